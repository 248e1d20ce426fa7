"""Make corpus.jsonl, train.jsonl and test.jsonl: 200 short documents on people, towns and countries that do not exist,
and questions that one search answers (the town of a person) or two (the country).

python make_data.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
FIRST = ("Ad", "Be", "Ca", "Do", "El", "Fa", "Gi", "Ha", "Il", "Jo", "Ka", "Lu")
LAST = ("bert", "dine", "gar", "lina", "mon", "nika", "ros", "senda", "tor", "vik", "wen", "zeta")
TOWNS = tuple(
    first + last
    for first in ("Ash", "Brin", "Cor", "Dun", "Elm", "Fen", "Gil", "Holm")
    for last in ("by", "dale", "ford", "mere", "ton", "wick")
)
COUNTRIES = ("Arland", "Borvia", "Cestan", "Dravia", "Elonia", "Fardan", "Gorland", "Hestia")
PEOPLE = tuple(a + b for a in FIRST for b in LAST)
ASK_TOWN, ASK_COUNTRY = "In which town does {} live?", "In which country does {} live?"
LIVES, LIES = "{} lives in {}.", "{} is a town in {}."
TEST = 40  # people whom no question of train.jsonl names


def write(name: str, rows: Iterable[dict[str, str]]) -> None:
    (HERE / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    source = random.Random(0)
    town_of = {person: source.choice(TOWNS) for person in PEOPLE}
    country_of = {town: source.choice(COUNTRIES) for town in TOWNS}
    documents = [(person, LIVES.format(person, town)) for person, town in town_of.items()]
    documents += [(town, LIES.format(town, country)) for town, country in country_of.items()]
    documents += [(country, f"{country} is a country.") for country in COUNTRIES]
    write("corpus.jsonl", ({"title": title, "text": text} for title, text in documents))
    people = source.sample(PEOPLE, len(PEOPLE))
    for split, chosen in (("test", people[:TEST]), ("train", people[TEST:])):
        rows = [{"prompt": ASK_TOWN.format(each), "answer": town_of[each]} for each in chosen]
        rows += [{"prompt": ASK_COUNTRY.format(each), "answer": country_of[town_of[each]]} for each in chosen]
        write(f"{split}.jsonl", source.sample(rows, len(rows)))


if __name__ == "__main__":
    main()
