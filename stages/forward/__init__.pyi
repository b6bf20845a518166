from .forwarding import ForwardSession as ForwardSession
