from .moving import send_to_device as send_to_device
from .score import Score as Score, write_score as write_score
from .streaming import Streamer as Streamer
