"""The version of Deltaloom, in the one place that pyproject and the server read."""

__version__ = "0.1.0"
