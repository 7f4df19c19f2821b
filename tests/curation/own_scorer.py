"""A scorer as a user would write it, for the tests."""


def is_even(response_text, answer, metadata):
    return int(response_text) % 2 == 0
