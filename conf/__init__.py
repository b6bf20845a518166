"""The Hydra tree and the embedded checkpoint, shipped as package data (``pkg://offstage.conf``)."""
