"""Which question a request asks: whether two requests ask the same, or say the same otherwise.

White space and Unicode's canonical forms make no other question. Its compatibility forms do (NFKC
turns 5² into 52), and so does white space inside quotes, in texts of several lines, where it may be
what is asked about, and in a text that the answer continues: it has to fit to its end.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import normalize

import msgspec

from policy.signals.words import content, negated, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controller.gateway.asking import Asked

LETTERS_MOST = 300
"""Of a question that others may be like: a longer one is no question that many ask."""
_PASSING = frozenset({
    "stream", "stream_options", "user", "priority", "request_id", "metadata",
})  # fmt: skip
"""Fields that do not change what is asked. A seed does: another one asks for another draw."""
_KEYS = 2
"""Goes up when a key comes to stand for something else, so that nothing of before is found."""
_ELSEWHERE = re.compile(r"\s*(?!data:)[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""A picture's or a recording's address: what lies there is no part of the request, and changes."""
_encode = msgspec.json.Encoder(order="deterministic").encode

_QUOTE = re.compile(r"[\"`“”„«»「」『』‘]|(?<!\w)['’]|['’](?!\w)")  # noqa: RUF001
_ABOUT_WORDS = re.compile(
    r":|\b(?:say|says|said|saying|translat\w*|spell\w*|words?|wording|phrases?|write|writing|wrote"
    r"|reply|repl(?:y|ies)|mean|means|meaning|rewrite|rephrase|proofread|correct|repeat|type|print"
    r"|answer\w*|respond\w*|greet\w*|polite\w*|rude\w*|called|named?|titles?|letters?|characters?"
    r"|(?:this|my(?: last| first)?) (?:text|message|sentence|prompt|question)"
    r"|did I (?:just )?(?:begin|start|thank|ask))\b"
    r"|[说說写寫译譯词詞句字叫读讀称稱]|意思|名|回复|回答|表达|区别|不同|敬语|[用和与跟]您|您[和与跟]",
    re.IGNORECASE,
)
"""Where it may be about the very words that are courtesies elsewhere."""
_WH = r"(?:how|what|what's|where|where's|which|who|who's|whom|whose|why)\b"
_BEGINS = (
    r"(?:how|what|what's|when|where|where's|which|who|whom|whose|why|is|are|was|were|do|does|did"
    r"|can|could|would|should|must|have|has|am|i|i'm|i'd|i've|we|my|our|your|please|the|there|it)\b"
)
"""What a question goes on with after a greeting; before others it may be part of a name."""
_BEGINS_CHINESE = (
    r"(?:请|請|我|怎|如何|什么|为什么|为何|哪|能|可以|可不可以|是否|有没有|你|您|想|麻烦|谁)"
)
_ASKS_CHINESE_FIRST = r"(?:怎|如何|什么|为什么|为何|哪|谁|多少|几|是否|有没有|能不能|可不可以)"
_COURTESIES = [
    (re.compile(pattern, re.IGNORECASE), instead)
    for pattern, instead in (
        (r"^(?:hi|hello|hey|good (?:morning|afternoon|evening))(?: there| team| all| everyone)?"
         rf"(?:[,.!]\s*(?={_BEGINS})|\s+(?={_WH}))", ""),
        (rf"^(?:您好|你好|哈喽)[,，.。!！~\s]+(?={_BEGINS_CHINESE})", ""),  # noqa: RUF001
        (r"^(?:请问|請問)[,，:：\s]*", ""),  # noqa: RUF001
        # Others may be asked or told what follows: 请告诉我妈妈怎么办.
        (r"^(?:麻烦问一下|想问一下|我想问一下|我想知道|请告诉我)"
         rf"(?:[,，:：\s]+(?={_BEGINS_CHINESE})|(?={_ASKS_CHINESE_FIRST}))", ""),  # noqa: RUF001
        (r"([.?!])\s*(?:many thanks|thanks|thank you)(?: in advance| a lot| (?:very|so) much)?"
         r"[.!]*$", r"\1"),
        (r",\s*(?:please|thanks|thank you)([.?!]*)$", r"\1"),
        (r"([,，.。?？!！])\s*(?:谢谢|多谢|謝謝)(?:您|你|了)?[.。!！]*$", r"\1"),  # noqa: RUF001
        (r"^(?:please|kindly),?\s+(?=(?-i:[a-z])\w*\s)", ""),
        (r"^(?:(?:can|could|would|will) you (?:please |kindly )?tell me|tell me|do you know"
         r"|i(?:'d| would)? (?:like|want|need) to know|i(?:'m| am| was) wondering|may i ask)"
         rf",?\s+(?={_WH})", ""),
        ("您", "你"),
    )
]  # fmt: skip
_SHORT = [
    (re.compile(pattern, re.IGNORECASE), instead)
    for pattern, instead in (
        (r"\bcan't\b|\bcannot\b", "can not"), (r"\bwon't\b", "will not"),
        (r"\bshan't\b", "shall not"), (r"(?<=[a-z])n't\b", " not"),
        (r"\b(what|where|who|how|when|it|that|there|here)'s\b", r"\1 is"),
        (r"\bi'm\b", "I am"), (r"\b(you|we|they)'re\b", r"\1 are"),
        (r"\b(i|you|we|they)'ve\b", r"\1 have"), (r"\b(i|you|we|they|he|she|it)'ll\b", r"\1 will"),
    )
]  # fmt: skip
_SMALL_I = re.compile(r"\b(do|can|could|may|should|must|did|am|will|would) i (?=[a-z])")
_FIRST_WORD = re.compile(
    r"(?:^|(?<=[.?!]\s))(?:How|What|When|Where|Which|Who|Whom|Whose|Why|Is|Are|Was|Were|Do|Does|Did"
    r"|Can|Could|Would|Should|Must|Have|Has|Had|Am|The|A|An|My|Your|Our|There|This|That|It|If|In|On"
    r"|At|For|To|From|With|Please|Tell|Give|Show|List|Explain|Summarize|Translate|Write|Create|Find"
    r"|Describe|Compare|After|Before|Export|Open|Delete)(?=\s)"
)
"""Small and capital letters mean the same in these; China and china are two things anywhere."""
_STATES = (
    r"(?:look|sound|feel|seem|appear|smell|taste|come across|rank|rate|score|compare|differ|stand"
    r"|fit|fare|perform|be|have|still|owe|need|exist|matter)\b"
)
"""After "how do I" these ask how it is with somebody, after "how can I" how that can be."""
_HOW = re.compile(rf"^how (?:(?:do|can) I|I can) (?!{_STATES})(?=[a-z])")
_HOW_CHINESE = re.compile(
    r"^(?:我(?:要|该|应该|可以|能)?)?(?:如何|怎么|怎样|怎樣)(?=[^不没沒会會这這那了样樣])"
)
_ASKS = re.compile(
    rf"^(?:{_WH}|(?:is|are|was|were|do|does|did|can|could|will|would|should|shall|may|must|have|has"
    r"|had) (?:I|you|we|they|he|she|the|my|your|our|their|there|this|that)\b"
    r"|(?:is|was|does|did|can|could|will|would|should|must|has) it\b)"
)
_ASKS_CHINESE = re.compile(
    r"[吗嗎]$|如何|怎么|怎样|怎樣|什么|甚麼|什麼|多少|哪|几|幾|谁|誰|为何|為何|是否"
)
_MARK = re.compile(r"(?<=[\w)\]）%])[?？.。]$")  # noqa: RUF001
"""One that ends a sentence; others are wildcards, folders, or part of what is asked about."""
_ABOUT_MARKS = re.compile(
    r"\b(?:regex\w*|regular expressions?|wildcards?|glob\w*|marks?|full stops?|periods?|dots?"
    r"|punctuat\w*|url|path)\b|https?:|正则|通配|标点|问号|句号|网址|路径",
    re.IGNORECASE,
)
_ABOUT_SPACE = re.compile(
    r"\b(?:(?:white)?spac(?:es?|ed|ing)|blanks?|tabs?|indent\w*|align\w*|characters?|letters?)\b"
    r"|空格|空白|缩进|縮進|制表|对齐|對齊|字符|字数|字數",
    re.IGNORECASE,
)
"""Where white space may be what is asked about, or is counted."""
_LOOKED_AT = 3_000
"""Characters at each end of a long text: what is to be done stands there."""
_HAN = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_BESIDE_HAN = re.compile(rf"(?<=[{_HAN}]) (?![{_HAN}])|(?<![{_HAN}]) (?=[{_HAN}])")
"""Between two of them a space tells where a name ends."""


class Likeness(NamedTuple):
    """By what questions are found that say the same."""

    alike: bytes
    """A hash that is equal for requests which differ only in how their last message says the same,
    and by whom."""
    text: str
    """That message, for its vector."""


def is_whole(asked: Asked) -> bool:
    """Whether the request holds all that is asked: no picture, recording or document that its
    server fetches from somewhere, where there may be another one by the next time."""
    messages = asked.document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        said = message.get("content") if isinstance(message, dict) else None
        for part in said if isinstance(said, list) else ():
            if isinstance(part, dict) and any(
                name != "text" and _is_elsewhere(each) for name, each in part.items()
            ):
                return False
    return True


def _is_elsewhere(each: Any) -> bool:
    if isinstance(each, dict):
        return any(map(_is_elsewhere, each.values()))
    return isinstance(each, str) and _ELSEWHERE.match(each) is not None


def key_of(asked: Asked) -> bytes:
    """A hash of all that is asked, by whom (the tenant), and of which model."""
    return _hash(asked, _normalized(_asking(asked)))


def likeness_of(asked: Asked) -> Likeness | None:
    """None: an answer to no other question will do. It takes a millisecond for a long one."""
    last = _last_text(asked)
    if not last:
        return None
    before = _asking(asked)
    before["messages"] = before["messages"][:-1]
    return Likeness(_hash(asked, [_normalized(before), *meaning(last)]), last)


def _asking(asked: Asked) -> dict[str, Any]:
    return {name: each for name, each in asked.document.items() if name not in _PASSING}


def meaning(text: str) -> tuple[str, list[str], list[str], bool]:
    """What has to be equal for two texts to say the same: their words in order, courtesies and
    short forms aside, and beside them content words, numbers and negation.

    Word order stays, since "from A to B" is not "from B to A"; so do articles ("a few"), modal
    verbs and case ("US", "us"). That loses most paraphrases, and mixes no two questions up.
    """
    text = " ".join(normalize("NFC", text).replace("’", "'").split())  # noqa: RUF001
    courteous = not _ABOUT_WORDS.search(text)
    for pattern, instead in _COURTESIES if courteous else ():
        text = pattern.sub(instead, text, count=1).strip()
    for pattern, instead in _SHORT:
        text = pattern.sub(instead, text)
    text = _SMALL_I.sub(r"\1 I ", _FIRST_WORD.sub(lambda found: found[0].lower(), text))
    text = _without_end(_BESIDE_HAN.sub("", text))
    text = _HOW_CHINESE.sub("怎么", _HOW.sub("how to ", text))
    return text, sorted(content(text)), sorted(numbers(text)), negated(text)


def _without_end(text: str) -> str:
    """Without the mark at its end, where that says no more than the words do."""
    if _ABOUT_MARKS.search(text):
        return text
    bare = text[:-1] if _MARK.search(text) else text
    if bare != text and not text.endswith((".", "。")):
        asks = _ASKS.search(bare) or _ASKS_CHINESE.search(bare)
        return _without_particle(bare) if asks else f"{bare}?"
    return _without_particle(bare if bare[-1:].isalpha() else text)


def _without_particle(text: str) -> str:
    bare = text[:-1]
    return bare if text.endswith(("呢", "啊", "呀")) and _ASKS_CHINESE.search(bare) else text


def _last_text(asked: Asked) -> str:
    """The user's message at the end of a chat, where it is one line of plain text."""
    document = asked.document
    messages = document.get("messages")
    if asked.endpoint != "chat" or not isinstance(messages, list):
        return ""
    last = messages[-1]
    if document.get("continue_final_message"):
        return ""
    if not isinstance(last, dict) or last.get("role") != "user":
        return ""
    if set(last) - {"role", "content"}:
        return ""
    text = last.get("content")
    if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict):
        part = text[0]
        text = part.get("text") if set(part) == {"type", "text"} and part["type"] == "text" else ""
    if not isinstance(text, str) or len(text) > LETTERS_MOST:
        return ""
    if text != " ".join(text.split()) and _is_about_space(messages):
        return ""
    text = text.strip()
    return "" if len(text.splitlines()) != 1 or _QUOTE.search(text) else text


def _hash(asked: Asked, what: Any) -> bytes:
    return blake2b(_encode([_KEYS, asked.tenant, asked.endpoint, what]), digest_size=16).digest()


def _normalized(document: dict[str, Any]) -> dict[str, Any]:
    """With its texts normalised; what is no text stays as it is."""
    found = dict(document)
    prompt, messages = document.get("prompt"), document.get("messages")
    if isinstance(prompt, str):
        found["prompt"] = _exact(prompt)
    if isinstance(messages, list):
        exact = [_message(each, _exact) for each in messages]
        plain = [_message(each, _plain) for each in messages]
        if messages and _is_continued(document, messages[-1]):
            plain[-1] = exact[-1]
        # Looked for only where it matters: that takes a while.
        found["messages"] = exact if plain != exact and _is_about_space(messages) else plain
    return found


def _is_continued(document: dict[str, Any], last: Any) -> bool:
    """Whether the answer goes on where the last message ends."""
    continued = document.get("continue_final_message")
    return bool(continued) or (isinstance(last, dict) and last.get("role") == "assistant")


def _is_about_space(messages: list[Any]) -> bool:
    most = _LOOKED_AT
    return any(
        _ABOUT_SPACE.search(text if len(text) <= 2 * most else f"{text[:most]} {text[-most:]}")
        for each in messages
        for text in _texts(each)
    )


def _texts(message: Any) -> Iterator[str]:
    said = message.get("content") if isinstance(message, dict) else None
    for part in said if isinstance(said, list) else (said,):
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _message(message: Any, plain: Callable[[str], str]) -> Any:
    if not isinstance(message, dict):
        return message
    said = message.get("content")
    if isinstance(said, str):
        return {**message, "content": plain(said)}
    if isinstance(said, list):
        return {**message, "content": [_part(each, plain) for each in said]}
    return message


def _part(part: Any, plain: Callable[[str], str]) -> Any:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {**part, "text": plain(part["text"])}
    return part


def _exact(text: str) -> str:
    return normalize("NFC", text)


def _plain(text: str) -> str:
    text = normalize("NFC", text)
    if len(text) > LETTERS_MOST or len(text.strip().splitlines()) > 1 or _QUOTE.search(text):
        return text.rstrip().lstrip("\r\n")
    return " ".join(text.split())
