"""Detection of the language of a text, among a few, by its letters and its most common words.

No statistics of letters: a text of a sentence or more is told, a name or a word may not be.
"""

from __future__ import annotations

import re
from collections import Counter

# The scripts; each group names the languages here that are written in it.
SCRIPTS = re.compile(
    r"""
    (?P<en_de_es_fi_fr_it_pt_sw>[\u0041-\u024f]) | (?P<ru_bg>[\u0400-\u04ff])
  | (?P<ar_fa_ur>[\u0600-\u06ff]) | (?P<hi_mr_ne>[\u0900-\u097f]) | (?P<bn>[\u0980-\u09ff])
  | (?P<pa>[\u0a00-\u0a7f]) | (?P<gu>[\u0a80-\u0aff]) | (?P<ta>[\u0b80-\u0bff])
  | (?P<te>[\u0c00-\u0c7f]) | (?P<kn>[\u0c80-\u0cff]) | (?P<ml>[\u0d00-\u0d7f])
  | (?P<th>[\u0e00-\u0e7f]) | (?P<vi>[\u1e00-\u1eff]) | (?P<ja>[\u3040-\u30ff])
  | (?P<zh>[\u4e00-\u9fff]) | (?P<ko>[\uac00-\ud7af])
    """,
    re.VERBOSE,
)
WORDS: dict[str, str] = {
    "en": "the of and to in is that it for as with was on are this be by you i my not have from",
    "de": "der die und das ist nicht ein eine zu den mit von auf für sich es im dem ich sie auch",
    "es": "de que no una para el la los en y es por con las se un del su como más pero",
    "fi": "ja on ei että se oli hän mutta kun tai myös ovat niin olen joka ole kuin voi sekä",
    "fr": "le la les des et est une que pour dans pas sur qui du au ce il elle vous nous avec",
    "it": "di che non una per il la è un del della con sono si le gli nel anche più ma",
    "pt": "de que não uma para com os em do da é um por mais como se na ao seu você são",
    "sw": "na ya wa kwa ni katika za la kuwa hii cha yake kama hiyo watu sana pia lakini",
    "vi": "và là của có không được cho một những trong với người các này để tôi bạn khi",
    "ru": "и в не на что он как это по но из от для мы я вы они был или так все",
    "bg": "и на да се за от не са по това ще който е в с като съм има при също",
    "ar": "في من على أن إلى هذا التي الذي ما لا عن مع كان هذه أو كل هو هي",
    "fa": "و در به از که این است را با برای آن می شود هم یک تا شما ما کند های",
    "ur": "کے کی میں ہے اور سے کا کو پر نے یہ ہیں ایک کہ بھی نہیں ہو اس",
    "hi": "है के में की से और का को पर नहीं यह हैं एक भी ने कि लिए हो",
    "mr": "आहे आणि या च्या मध्ये ते हे नाही होते आहेत एक व तर मी आपण पण",
    "ne": "छ र को मा गर्न हुन्छ पनि हो भने लागि छन् यो गर्नुहोस् एक तपाईं म",
}
# Letters that one of the languages of a script has, and its neighbours do not.
LETTERS: dict[str, str] = {
    "vi": "ăâđêôơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "de": "ß",
    "ru": "ыэё",
    "bg": "ъ",
    "fa": "پچژگ",
    "ur": "ٹڈڑںےہ",
    "mr": "ळ",
}
KNOWN = frozenset("_".join(SCRIPTS.groupindex).split("_"))


def language_of(text: str) -> str:
    """The language of a text, as ISO 639-1 writes it; empty where nothing tells.

    Args:
        text: a sentence or more can be told.
    """
    letters = "".join(filter(str.isalpha, text.lower()))
    places = Counter(letter.lastgroup or "" for letter in SCRIPTS.finditer(letters))
    if not places:
        return ""
    if sum(letter in LETTERS["vi"] for letter in letters) > len(letters) / 20:
        return "vi"
    if places["ja"]:
        return "ja"
    names = places.most_common(1)[0][0].split("_")
    if len(names) == 1:
        return names[0]
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]+)*", text.lower()))
    marks = Counter(letters)
    # Common words of each language, and letters of its own.
    evidence: Counter[str] = Counter()
    for name in names:
        evidence[name] = sum(words[word] for word in WORDS[name].split())
        evidence[name] += sum(marks[letter] for letter in LETTERS.get(name, ""))
    [(best, found)] = evidence.most_common(1)
    return best if found else ""


def is_language(text: str, name: str) -> bool:
    """True if a text is in a language; one in Latin letters whose language nothing tells passes as
    English.

    Args:
        text: any; a sentence or more can be told.
        name: two letters of ISO 639-1, one of KNOWN; for any other the answer is no.
    """
    found = language_of(text)
    return found == name or (name == "en" and not found)
