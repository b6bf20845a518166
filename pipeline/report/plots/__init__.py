"""The plots of a report, one file each; every one turns numbers into a ``Picture``, or None where there are none."""
