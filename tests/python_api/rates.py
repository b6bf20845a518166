"""The rates of a machine, given to models so that a test measures nothing."""

RATES = {"storage": "1GB", "host": "10GB", "calls": 15_000, "dequantising": "1GB", "multiplying": "10GB"}
