"""The plots of a report, by what they are about; each turns numbers into a ``Picture``, or None where there are none."""
