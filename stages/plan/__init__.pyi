from .plan import Plan as Plan
