"""Images in a request: fetched only for models that take images, within limits.

Limits are on number, bytes, pixels, time and addresses. A host's addresses are looked up once and
checked, and the connection goes to the checked one; a redirect is checked like a first URL.
"""

import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from threading import Timer
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from dspine_mlx.server.fields import FieldError
from dspine_mlx.server.validation import image_url

MOST = 16  # images per request
BYTES = 32 << 20  # of all images
PIXELS = 1 << 25  # of one image, some 33 million
SECONDS = 15.0  # for one image, redirects included
REDIRECTS = 3


def image_parts(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if image_url(part) is not None)


def inline_images(messages: list[Any], private: bool) -> None:
    """Replace http(s) URLs in messages by data URLs; `FieldError` for anything but an image.

    private: whether to fetch from addresses that are not public.
    """
    parts = list(image_parts(messages))
    if len(parts) > MOST:
        raise refused(f"the request has {len(parts)} images; this server takes up to {MOST}")
    room = BYTES
    for part in parts:
        url = image_url(part) or ""
        if url.startswith(("http://", "https://")):
            kind, data = fetch(url, private, room)
            url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        elif url.startswith("data:"):
            data = decoded(url, room)
        else:
            raise refused("an image's URL must start with http://, https:// or data:")
        room -= len(data)
        check_pixels(data)
        part.clear()
        part.update(type="image_url", image_url={"url": url})


def refused(message: str) -> FieldError:
    return FieldError("messages", message)


def decoded(url: str, room: int) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise refused("an image's data: URL must be base64")
    if len(text) > room * 4 // 3 + 4:
        raise too_large()
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise refused(f"an image's data: URL is not base64: {error}") from error


def too_large() -> FieldError:
    return refused(f"the request's images have more than {BYTES >> 20} MB in all")


def check_pixels(data: bytes) -> None:
    """Check an image's size without decoding it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError) as error:
        raise refused(f"an image can't be read: {error}") from error
    if width * height > PIXELS:
        raise refused(f"an image has {width} x {height} pixels; this server takes up to {PIXELS}")


def fetch(url: str, private: bool, room: int) -> tuple[str, bytes]:
    """Fetch the media type and bytes of an http(s) URL."""
    deadline = time.monotonic() + SECONDS
    target: str | None = ""
    for _ in range(REDIRECTS + 1):
        try:
            url = urljoin(url, target)
            kind, data, target = fetch_once(urlsplit(url), private, room, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, FieldError):
                raise
            raise refused(f"an image can't be fetched: {type(error).__name__}") from error
        if target is None:
            return kind, data
    raise refused(f"an image's URL redirects more than {REDIRECTS} times")


def fetch_once(
    url: SplitResult, private: bool, room: int, deadline: float
) -> tuple[str, bytes, str | None]:
    """Fetch the media type and bytes, or the address that the answer redirects to."""
    if url.scheme not in ("http", "https") or not url.hostname:
        raise refused("an image's URL must lead to http:// or https:// and a host")
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    address = public_address(url.hostname, port, private)
    sock = socket.create_connection((address, port), left(deadline))
    alarm = Timer(left(deadline), partial(end, sock))
    alarm.start()
    try:
        if secure:
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=url.hostname)
        connection = http.client.HTTPConnection(url.hostname, port)
        connection.sock = sock  # of the address that was checked
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        connection.request("GET", path, headers={"Accept": "image/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            return "", b"", response.getheader("Location", "")
        if response.status != 200:
            raise refused(f"an image can't be fetched: its server answers {response.status}")
        return response.headers.get_content_type(), read(response, room, deadline), None
    finally:
        alarm.cancel()
        sock.close()


def end(sock: socket.socket) -> None:
    """End any wait for the other side."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def read(response: http.client.HTTPResponse, room: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) <= room:
        chunk = response.read1(1 << 16)
        left(deadline)  # the alarm's end looks like the data's
        if not chunk:
            return bytes(data)
        data += chunk
    raise too_large()


def left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise refused(f"an image could not be fetched within {SECONDS:.0f} s")
    return seconds


def public_address(name: str, port: int, private: bool) -> str:
    """Look up a host's address; `FieldError` if any is not public, unless that is allowed."""
    found = [info[4][0] for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    addresses = [str(address) for address in found]
    if not private and not all(map(is_public, addresses)):
        raise refused("an image's URL leads to an address that is not public")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is not private, loopback, link-local, multicast or reserved, nor leads to
    such a one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in UNICAST:  # retired ways to IPv4 and to a site's own addresses are elsewhere
            return False
    return ip.is_global and not ip.is_multicast


NAT64 = ipaddress.ip_network("64:ff9b::/96")
UNICAST = ipaddress.ip_network("2000::/3")  # all that is given out of IPv6
