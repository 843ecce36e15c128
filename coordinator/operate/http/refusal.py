"""A request that is answered with an error: a status and words for people."""

from __future__ import annotations

from http import HTTPStatus

from coordinator.errors import CoordinatorError


class RefusalError(CoordinatorError):
    """A request that is refused; the text says why and what to do."""

    def __init__(self, status: HTTPStatus, words: str, *, retry_s: int | None = None) -> None:
        """`retry_s`: seconds after which the request may succeed."""
        super().__init__(words)
        self.status, self.retry_s = status, retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = 'Bearer realm="tessera"'
        return headers
