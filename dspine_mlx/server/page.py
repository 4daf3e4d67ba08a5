"""GET /: a page that shows how the server does, and GET /figures, which it reads. No text of any
request or reply is in either."""

import base64
import binascii
import hashlib
import math
import re
from pathlib import Path
from typing import Any

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.server.generator import ResponseGenerator
from dspine_mlx.server.health import health

DEPTH = 512  # positions of context that the cost curve is shown for
SOURCE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def digests(tag: str) -> str:
    """The page's own scripts or styles, as its content security policy names them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", SOURCE, re.DOTALL)
    sums = (hashlib.sha256(text.encode()).digest() for text in found)
    return " ".join(f"'sha256-{base64.b64encode(s).decode()}'" for s in sums)


PAGE = SOURCE.encode()
HEADERS = {  # nothing from elsewhere, nothing injected, in nobody's frame
    "Content-Security-Policy": f"default-src 'none'; connect-src 'self'; style-src "
    f"{digests('style')}; script-src {digests('script')}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def figures(generator: ResponseGenerator) -> dict[str, Any]:
    """What the page shows, as JSON."""
    metrics = generator.metrics
    drafter = next(iter(generator.model_provider.drafters.values()), None)
    with metrics.lock:
        recent = list(metrics.recent)
        rounds = sum(metrics.accepted.counts)
        totals = {
            "requests": sum(metrics.requests.values()),
            "tokens": metrics.tokens["generated"],
            "drafted": metrics.drafts["drafted"],
            "accepted": metrics.drafts["accepted"],
            "rounds": rounds,
            "tokens_per_round": 1 + metrics.accepted.sum / rounds if rounds else None,
        }
    return {
        "health": health(generator),
        "running": [call.figures() for call in generator.calls.running()],
        "totals": totals,
        "verdict": next((r["verdict"] for r in recent if r["verdict"]), ""),
        "costs": costs(drafter),
        "recent": recent,
    }


def costs(drafter: Drafter | None) -> dict[str, Any] | None:
    """Milliseconds of a plain token, a draft, and forwards over 1, 2 ... rows, as learnt so far;
    None while there is but a guess."""
    if drafter is None or drafter.schedule is None:
        return None
    known = drafter.schedule.costs  # read only: its predictions are the generation thread's
    if not (known.curve.measured or known.x.any()):
        return None
    steps = zip(known.curve.at(DEPTH), known.x.tolist(), strict=True)
    plain, *verify, draft = (1e3 * step * math.exp(x) for step, x in steps)
    return {
        "depth": DEPTH,
        "measured": known.curve.measured,
        "plain": plain,
        "draft": draft,
        "verify": verify,
    }


def password(header: str) -> bytes | None:
    """Of HTTP's Basic scheme, which browsers ask for; any user name will do."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None
