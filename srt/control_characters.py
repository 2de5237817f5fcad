"""Control characters, by which a text can steer the terminal that shows it: move the cursor, set
the title, answer as if typed.
"""

# C0, DEL and C1, as Unicode and ECMA-48 have them.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}


def escape_controls(text: str, keep: str = "") -> str:
    """A text with each control character that is not in `keep` as backslash, x and its number in
    hexadecimal.
    """
    table = {code: escape for code, escape in _ESCAPES.items() if chr(code) not in keep}
    return text.translate(table)
