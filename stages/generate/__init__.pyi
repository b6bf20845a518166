from .decode import decode_plainly as decode_plainly, decode_with_transformers as decode_with_transformers
from .generation import GenerationSession as GenerationSession
