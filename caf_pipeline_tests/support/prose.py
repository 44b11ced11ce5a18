"""Counts sentences and names that readers stumble over.

`python -m caf_pipeline_tests.support.prose PATH …` lists them.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST_WORDS = 25
"""Words of a sentence that a tired reader still follows."""

LATE_SUBJECT = re.compile(
    r"(?:Of|What(?:ever)?|Who(?:m|se|ever)?|Whether|Where|Which|Those|That which|As|Between"
    r"|With(?:out)?|(?:For|From|By|In) which)\b(?!.*\?)"
)
"""A sentence that begins with these words has its subject late, or none. Questions may."""

PATTERNS = {
    re.compile(pattern, re.IGNORECASE): advice
    for pattern, advice in {
        r"\b(?:told|tells)\b": "reports, shows, knows",
        r"\b(?:is|are|was|were|been) said\b": "name who reports it",
        r"\banew\b": "again",
        r"\b(?:nobody|no one)\b": "name what is missing: no process, no provider",
        r"\b(?:that|which|who|what) (?:is|are|was) (?:none|no|not one)\b": "an invalid …",
        r"\b(?:of|by) (?:what|which|whom|those that)\b": "name the thing",
        r"\b(?:is|are) to be \w+(?:ed|en|n)\b": "must be …, or the verb",
        r"\bthe ones? that\b": "name it",
        r"\bas (?:it|they|one) (?:is|are|was|were|does|do|did)\b": "name the state",
        r"\balso (?:where|(?:of|in|with) (?:an?|what))\b": "even if …",
        r"\bwhere (?:it|there|that|they|none|nothing)\b": "if …, when …",
        r"\b(?:cannot|can not) be had\b": "is not available",
        r"\b(?:is|are) amiss\b": "is wrong",
        r"\bgives? out\b": "returns",
    }.items()
}

UNCLEAR_NAMES = re.compile(
    "said|told|found|its|theirs|ours|ones?|each|it|them|those|given|own|asked|known|seen|wanted"
    "|left|these"
)

_Text = tuple[int, str]
"""A line's number and what a reader reads from there in one go."""


@dataclass
class Prose:
    """What was read. A finding is `path:line: fault: sentence`."""

    sentences: int = 0
    findings: list[str] = field(default_factory=list)
    unclear_names: list[str] = field(default_factory=list)

    @property
    def findings_per_100(self) -> float:
        """Findings for each 100 sentences."""
        return 100 * len(self.findings) / max(1, self.sentences)


def read_prose(paths: list[Path]) -> Prose:
    """Read Python modules and Markdown pages; folders are searched for both."""
    prose = Prose()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix == ".md":
                _read_texts(prose, file, _paragraphs(file.read_text()), each_opens=False)
            elif file.suffix == ".py":
                source = file.read_text()
                tree = ast.parse(source)
                _read_texts(prose, file, _docstrings(tree), each_opens=True)
                _read_texts(prose, file, _comments(source), each_opens=False)
                _read_texts(prose, file, _messages(tree), each_opens=False)
                prose.unclear_names += (
                    f"{file}:{node.lineno}: {node.id}"
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Name)
                    and isinstance(node.ctx, ast.Store)
                    and UNCLEAR_NAMES.fullmatch(node.id)
                )
    return prose


def faults(sentence: str, *, opens: bool) -> list[str]:
    """Return what a reader stumbles over. `opens`: the reader has no sentence before it."""
    words = len(re.findall(r"[\w'’-]+", re.sub(r"`[^`]*`", "code", sentence)))
    long = [f"{words} words"] if words > MOST_WORDS else []
    match = LATE_SUBJECT.match(sentence) if opens else None
    late = [f"begins with {match[0]!r}"] if match else []
    odd = [
        f"{match[0]!r}: {advice}"
        for pattern, advice in PATTERNS.items()
        if (match := pattern.search(sentence))
    ]
    return long + late + odd


def _read_texts(prose: Prose, path: Path, texts: Iterable[_Text], *, each_opens: bool) -> None:
    for line, text in texts:
        for position, sentence in enumerate(re.split(r"(?<=[.!?:;])\s+", text.strip())):
            words = " ".join(sentence.split())
            prose.sentences += 1
            prose.findings += (
                f"{path}:{line}: {fault}: {words[:160]}"
                for fault in faults(words, opens=each_opens or position == 0)
            )


def _docstrings(tree: ast.Module) -> Iterator[_Text]:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def _messages(tree: ast.Module) -> Iterator[_Text]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.expr() as message):
                pass
            case ast.keyword(arg="hint" | "help" | "description", value=message):
                pass
            case _:
                continue
        for part in ast.walk(message):
            match part:
                case ast.Constant(value=str(text)) if text.count(" ") > 3:
                    yield part.lineno, text


def _comments(source: str) -> list[_Text]:
    texts: list[_Text] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            if texts and token.start[0] == last + 1:
                texts[-1] = (texts[-1][0], f"{texts[-1][1]}\n{words}")
            else:
                texts.append((token.start[0], words))
            last = token.start[0]
    return texts


def _paragraphs(text: str) -> list[_Text]:
    """Return paragraphs and list items. Code blocks, tables, headings and images have no prose."""
    texts: list[_Text] = []
    fenced = open_paragraph = False
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip()
        if bare.startswith(("```", "~~~")):
            fenced = not fenced
        if fenced or not bare or bare.startswith(("```", "~~~", "|", "#", "<", "![")):
            open_paragraph = False
            continue
        item = re.match(r"(?:[-*+]|\d+\.)\s+", bare)
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", bare[item.end() :] if item else bare)
        if open_paragraph and not item:
            texts[-1] = (texts[-1][0], f"{texts[-1][1]}\n{words}")
        else:
            texts.append((number, words))
        open_paragraph = True
    return texts


if __name__ == "__main__":
    read = read_prose([Path(argument) for argument in sys.argv[1:]])
    print(*read.findings, *read.unclear_names, sep="\n")
    print(f"{read.findings_per_100:.1f} findings per 100 sentences", file=sys.stderr)
    print(f"{len(read.unclear_names)} unclear names", file=sys.stderr)
