"""How bytes travel: from storage to the host, and over the link to an accelerator."""
