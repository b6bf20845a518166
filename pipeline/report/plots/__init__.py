"""The plots of a report, by their subjects; each turns numbers into a ``Picture``, or None where there are none."""
