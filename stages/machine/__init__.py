"""What a machine is: hardware, host memory and its caps, rates and their probes, devices and ledgers."""
