"""Token ids as plain words, for servers that take only text: equal ids become equal words, a few tokens each."""

CONSONANTS = "bdfgklmnprst"
VOWELS = "aeiou"


def word(number: int) -> str:
    """A space and a pronounceable name of `number`, unique to it."""
    syllables = ""
    while True:
        number, consonant = divmod(number, len(CONSONANTS))
        number, vowel = divmod(number, len(VOWELS))
        syllables += CONSONANTS[consonant] + VOWELS[vowel]
        if number == 0:
            return " " + syllables
