"""Why there is no connection, in words for the person who has to change something."""

from __future__ import annotations

import socket
import ssl

from edge_sdk.transport.settings import BrokerSettings

_REFUSALS = {
    "Bad user name or password": "the broker refused the user name or password",
    "Not authorized": "the broker does not let this user connect; check username, password, "
    "certificate and the broker's access rules",
    "Client identifier not valid": "the broker does not accept the client id; some bind it to the "
    "user or certificate",
    "Server unavailable": "the broker is up but not ready; it may be starting or overloaded",
    "Unsupported protocol version": "what answers there does not speak MQTT 3.1.1",
}

_ALERTS = {
    "CERTIFICATE_REQUIRED": "the broker asks for a client certificate; set certificate and key",
    "UNKNOWN_CA": "the broker does not know the CA of our certificate",
    "CERTIFICATE_REVOKED": "our certificate was revoked",
    "CERTIFICATE_EXPIRED": "our certificate has expired",
    "BAD_CERTIFICATE": "the broker does not accept our certificate",
    "CERTIFICATE_UNKNOWN": "the broker does not accept our certificate",
    "HANDSHAKE_FAILURE": "the broker broke off the TLS handshake; it may ask for a client "
    "certificate (set certificate and key)",
    "WRONG_VERSION_NUMBER": "the broker does not speak TLS on this port; check port and tls",
    "RECORD_LAYER_FAILURE": "the broker does not speak TLS on this port; check port and tls",
}


def connect_failure(settings: BrokerSettings, error: Exception) -> str:
    """Why the socket, or TLS on it, could not be had."""
    where = settings.address
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{where}: the broker's certificate was not accepted: {error.verify_message}; "
            f"checked for {settings.host!r} against {settings.ca or 'the CAs of this machine'}"
        )
    if isinstance(error, ssl.SSLError):
        return f"{where}: {_alert(str(error)) or f'TLS failed: {error}'}"
    if isinstance(error, socket.gaierror):
        return f"{where}: the name {settings.host!r} was not found; check host, or the network"
    if isinstance(error, UnicodeError):
        return f"{where}: {settings.host!r} cannot be a host name"
    if isinstance(error, ConnectionRefusedError):
        return f"{where}: nothing listens there; is the broker running, is the port right?"
    if isinstance(error, TimeoutError):
        return f"{where}: no answer; is the host right, does a firewall drop the connection?"
    if settings.tls and isinstance(error, ConnectionError):
        return f"{where}: closed during the TLS handshake; does it speak TLS on this port?"
    words = error.strerror if isinstance(error, OSError) else None
    return f"{where}: {words or error}"


def refusal(settings: BrokerSettings, code: str) -> str:
    """Why the broker said no; `code` is the name MQTT gives it."""
    words = _REFUSALS.get(code, f"the broker refused the connection: {code}")
    user = f" (user {settings.username!r})" if settings.username else " (no user name is set)"
    return f"{settings.address}: {words}{user}"


def lost(settings: BrokerSettings, *, welcomed: bool, silent: bool, detail: str) -> str:
    """Why a connection ended. `welcomed`: the broker had accepted it; `silent`: it said nothing.

    `detail` is what the network said last, or empty.
    """
    where = settings.address
    if alert := _alert(detail):
        return f"{where}: {alert}"
    if silent and not welcomed:
        return f"{where}: something accepts connections there but does not answer as a broker would"
    if silent:
        return f"{where}: no sign of life from the broker; the network or the broker hangs"
    if not welcomed and settings.tls:
        # Under TLS 1.3 a broker judges our certificate after the handshake, and what it says of it
        # can be lost with the connection.
        return (
            f"{where}: closed after the TLS handshake, before the broker answered; it probably "
            "wants a certificate of ours that it trusts (set certificate and key)"
        )
    if not welcomed:
        return f"{where}: closed before the broker answered; does it expect TLS on this port?"
    return (
        f"{where}: the broker closed the connection; it may have stopped, or another connection "
        "uses the same name"
    )


def _alert(detail: str) -> str | None:
    text = detail.upper().replace(" ", "_")
    return next((words for key, words in _ALERTS.items() if key in text), None)
