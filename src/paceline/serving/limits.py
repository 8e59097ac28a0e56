"""How much one server does for its clients at once."""

from dataclasses import dataclass

from paceline.serving.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """The server's limits; each is answered with an error of the API that was called."""

    body_bytes: int = 32 << 20
    body_seconds: float = 30.0  # for a request's head to arrive, and for its body
    request_seconds: float = 3600.0  # for a request to be answered, its stream included
    queue: int = 4096  # requests in the engine, waiting and running
    connections: int = 8192

    def check_queue(self, outstanding: int, asked: int) -> None:
        """Raises where the engine has enough to do; one request that is alone is always taken."""
        if outstanding and outstanding + asked > self.queue:
            raise ApiError(
                429, f"{outstanding} requests are being served or wait, of {self.queue}; try again later"
            )
