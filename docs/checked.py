"""Links of a built site that lead nowhere: Zensical looks at links between pages, not at pictures and written HTML."""

import posixpath
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    """Each relative link to a file or an anchor that is not in the site, in words."""
    pages = {path.relative_to(site).as_posix(): _Page(path.read_text()) for path in site.rglob("*.html")}
    del pages["404.html"]  # served from any address, so its links are absolute
    dead = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = posixpath.join(posixpath.dirname(name), unquote(parts.path)) if parts.path else name
            target = posixpath.normpath(path)
            anchors = pages[target].anchors | {"", "__top"} if target in pages else {parts.fragment}
            if not (site / target).exists() or unquote(parts.fragment) not in anchors:
                dead.append(f"{name}: {link} leads nowhere")
    return dead
