"""The checkpoints that ship with offstage, and the scripts that make them."""
