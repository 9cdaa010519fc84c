"""Whether the server can answer: it starts before its engine and drains before it ends."""

from __future__ import annotations

from server.errors import UnavailableError
from server.service.served_model import ServedModel


class ServerState:
    """The served model once its engine is ready; before and after that, a reason why not."""

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._refusal: str | None = "The model is still loading."

    def open(self, model: ServedModel) -> None:
        """Begin to answer with `model`."""
        self._model = model
        self._refusal = None

    def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        self._refusal = "The server is shutting down."

    @property
    def is_healthy(self) -> bool:
        """Whether the engine has started and has not died."""
        return self._model is not None and self._model.client.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be taken."""
        return self.is_healthy and self._refusal is None

    @property
    def loaded_model(self) -> ServedModel | None:
        """The model, also while draining; None while it loads."""
        return self._model

    def require_model(self) -> ServedModel:
        """The model to answer a new request with.

        Raises:
            UnavailableError: loading or draining.
        """
        if self._model is None or self._refusal is not None:
            raise UnavailableError(self._refusal or "")
        return self._model
