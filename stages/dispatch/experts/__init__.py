"""Mixtures: only the experts that tokens are routed to are brought, and those likely to be wanted again are kept."""
