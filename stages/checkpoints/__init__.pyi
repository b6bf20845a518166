from .checkpoint import Checkpoint as Checkpoint, fingerprint_of as fingerprint_of, open_checkpoint as open_checkpoint
