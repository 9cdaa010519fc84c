"""Drafts from a file of known outputs, wrong where tests want them to be wrong."""
