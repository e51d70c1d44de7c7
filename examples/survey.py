"""Private statistics of 2,000 phones, and of the patients of 20 hospitals: `python examples/survey.py`."""

import math

import d2pfed

PHONES, HOSPITALS = 2000, 20


def survey() -> None:
    """Each phone is protected as a whole; four statistics, each with an epsilon of its own."""
    minutes = [[30 + 25 * math.sin(phone + day) for day in range(1 + phone % 7)] for phone in range(PHONES)]
    answers = [[("yes" if phone % 3 else "no", "city" if phone % 5 else "country")] for phone in range(PHONES)]
    shared = {"epsilon": 0.5, "delta": 1e-5}
    print(d2pfed.private_mean([sum(each) / len(each) for each in minutes], bounds=(0, 60), **shared))
    print(d2pfed.private_histogram(minutes, [0, 10, 20, 30, 40, 50, 60], **shared))
    print(d2pfed.private_quantile(minutes, [0.25, 0.5, 0.75], bounds=(0, 60), **shared))
    print(d2pfed.private_table(answers, {"answer": ["yes", "no"], "home": ["city", "country"]}, **shared))


def consortium() -> None:
    """Each patient is protected; a third of the hospitals may tell the server all they know."""
    pressures = [[100 + (7 * at + 3 * one) % 60 for one in range(100 + 20 * at)] for at in range(HOSPITALS)]
    patient = {"unit": "record", "records": 10_000, "colluders": 0.33, "dropouts": 0.0}
    print(d2pfed.private_mean(pressures, bounds=(80, 200), epsilon=1.0, privacy=patient))
    print(d2pfed.private_quantile(pressures, 0.9, bounds=(80, 200), epsilon=1.0, privacy=patient))


if __name__ == "__main__":
    survey()
    consortium()
