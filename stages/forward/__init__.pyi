from .forwarding import Forwarded as Forwarded, perform as perform
