"""Prompt lookup: drafts copied from where the request's last tokens occurred before."""
