"""Drafts by the model itself: its multi-token-prediction layer."""
