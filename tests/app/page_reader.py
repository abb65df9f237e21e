"""Parses a report's HTML into elements, texts and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "wbr", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        own = [self] if self.tag == tag else []
        return own + [found for child in self.children if isinstance(child, Element) for found in child.all(tag)]

    def everything(self) -> list[Element]:
        return [self, *(e for child in self.children if isinstance(child, Element) for e in child.everything())]

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def by_id(self, name: str) -> Element:
        (found,) = [element for element in self.everything() if element.attributes.get("id") == name]
        return found

    def rows(self) -> list[list[str]]:
        """The texts of the table rows inside, headings first."""
        return [
            [cell.text for cell in row.children if isinstance(cell, Element) and cell.tag in ("th", "td")]
            for row in self.all("tr")
        ]


class _Builder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("root", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parsed(html: str) -> Element:
    """Parse a page; a tag that is closed out of order is an AssertionError."""
    builder = _Builder()
    builder.feed(html)
    builder.close()
    assert builder._open == [builder.root]
    return builder.root
