"""Trackers: where runs are logged beside their records, in a store on this machine or by a server."""
