"""Detection of the language of a text, among a few, by its letters and its most common words.

No statistics of letters: a text of a sentence or more is told, a name or a word may not be.
"""

from __future__ import annotations

import re
from collections import Counter

from oxrl.types import Names, Texts

KANA = range(0x3040, 0x3100)
# Letters of a script -> the languages here that are written in it.
SCRIPTS: dict[range, Names] = {
    range(0x0041, 0x0250): ("en", "de", "es", "fi", "fr", "it", "pt", "sw"),
    range(0x0400, 0x0500): ("ru", "bg"),
    range(0x0600, 0x0700): ("ar", "fa", "ur"),
    range(0x0900, 0x0980): ("hi", "mr", "ne"),
    range(0x0980, 0x0A00): ("bn",),
    range(0x0A00, 0x0A80): ("pa",),
    range(0x0A80, 0x0B00): ("gu",),
    range(0x0B80, 0x0C00): ("ta",),
    range(0x0C00, 0x0C80): ("te",),
    range(0x0C80, 0x0D00): ("kn",),
    range(0x0D00, 0x0D80): ("ml",),
    range(0x0E00, 0x0E80): ("th",),
    range(0x1E00, 0x1F00): ("vi",),
    KANA: ("ja",),
    range(0x4E00, 0xA000): ("zh",),
    range(0xAC00, 0xD7B0): ("ko",),
}
WORDS: Texts = {
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
LETTERS: Texts = {
    "vi": "ăâđêôơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "de": "ß",
    "ru": "ыэё",
    "bg": "ъ",
    "fa": "پچژگ",
    "ur": "ٹڈڑںےہ",
    "mr": "ळ",
}
KNOWN = frozenset(name for names in SCRIPTS.values() for name in names)


def language_of(text: str) -> str:
    """The language of a text, as ISO 639-1 writes it; empty where nothing tells.

    Args:
        text: a sentence or more can be told.
    """
    letters = [letter for letter in text.lower() if letter.isalpha()]
    places = Counter(script for letter in letters for script in SCRIPTS if ord(letter) in script)
    if not places:
        return ""
    if sum(letter in LETTERS["vi"] for letter in letters) > len(letters) / 20:
        return "vi"
    if places.get(KANA):
        return "ja"
    names = SCRIPTS[places.most_common(1)[0][0]]
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
