"""Skills of the demo model, one function each: it adds a few turns to a chat."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from demo import quire_facts, stories, unknown, world
from demo.chat import LINES, TABLES, Chat, Lines, exactly
from demo.grammar import KEEP, article, chance, held_out, join, made_up_word, pick, render, sentence_case
from demo.knowledge import ask_one, follow_up, plural
from demo.stories import Hero
from demo.sums import arithmetic, number, number_sense, spoken, word_problem

# --- Small talk -----------------------------------------------------------------------------------------------------


def greeting(chat: Chat) -> None:
    rng = chat.rng
    kind = rng.random()
    offer = pick(rng, TABLES["offers"])
    name = chat.known.get("name", "")
    hello = f"Hello {name}!" if name else pick(rng, ("Hello!", "Hi!", "Hello there!", "Hi there!"))
    if kind < 0.4:
        chat.turn("greeting.hello", hello=hello, offer=offer)
    elif kind < 0.55:
        part = pick(rng, ("morning", "evening", "afternoon"))
        alone = "morning" if part == "morning" else f"good {part}"
        asked = f"[good {part}|good {part}!|good {part} to you|{alone}|hello, good {part}]"
        chat.add(asked, f"Good {part}! {offer}", short=f"Good {part}!", skill="greeting")
    elif kind < 0.85:
        hello = LINES["greeting.hello"].ask.removesuffix("[!|.|]")
        chat.turn("greeting.how_are_you", prefix=pick(rng, ("", "", f"{hello}, ")))
        if chance(rng, 0.6):
            how_i_am(chat)
    else:
        chat.turn("greeting.nice_to_meet_you", offer=offer)


def how_i_am(chat: Chat) -> None:
    """The user's reply to: how are you?"""
    if chance(chat.rng, 0.65):
        return chat.turn("greeting.i_am_fine")
    chat.turn("greeting.i_am_not_well")
    if chance(chat.rng, 0.7):
        chat.turn("greeting.a_joke_then", joke=joke_text(chat.rng))
    return None


def feeling(chat: Chat) -> None:
    words, answers = pick(chat.rng, TABLES["feelings"])
    chat.add(f"[I am|I'm|I feel|im|I am feeling|today I am|i'm feeling] {words}[.|!|]", answers, skill="small talk")
    if chance(chat.rng, 0.2):
        reaction(chat)


def news(chat: Chat) -> None:
    rng = chat.rng
    question, answers = pick(rng, TABLES["news"])
    likes = [*world.FOODS, *world.HOBBIES, "cats", "dogs", "horses", "birds", "rabbits", *TABLES["likes"]]
    slots = {
        "city": pick(rng, world.CITIES),
        "animal": pick(rng, list(world.ANIMALS)),
        "food": pick(rng, world.FOODS).replace("_", " "),
        "hobby": pick(rng, world.HOBBIES),
        "liked": pick(rng, likes).replace("_", " "),
        "thing": pick(rng, list(world.THINGS)),
        "relative": pick(rng, TABLES["relatives"]),
        "fact": pick(rng, world.FUN_FACTS),
    }
    text = sentence_case(render(rng, pick(rng, answers), slots))
    chat.add(question, "{text}", skill="small talk", text=text, **slots)
    if chance(rng, 0.25):
        chat.turn("greeting.after_news")


def thanks(chat: Chat) -> None:
    name = chat.known.get("name", "")
    chat.turn("greeting.thanks", end=f", {name}" if name and chance(chat.rng, 0.5) else "")


def goodbye(chat: Chat) -> None:
    name = chat.known.get("name", "")
    chat.turn("greeting.goodbye", end=f", {name}" if name else "")


def reaction(chat: Chat) -> None:
    question, answers = pick(chat.rng, TABLES["reactions"])
    chat.add(question if "?" in question else question + "[!|.|]", answers, skill="reaction")


def about_me(chat: Chat) -> None:
    """Questions to the model about itself."""
    rng, persona = chat.rng, chat.persona
    questions, answers, short = pick(rng, quire_facts.SELF if chance(rng, 0.6) else quire_facts.SELF[:6])
    question = chat.phrase(questions)
    first = questions.split("|", 1)[0]
    if persona.name and first == "[what is your name":
        answers, short = [f"My name is {persona.name}."], persona.name
    elif persona.name and first == "[who are you":
        answers, short = [f"I am {persona.name}, a small assistant. How can I help you?"], persona.name
    elif persona.role and first == "[who are you":
        answers, short = [f"I am {persona.role}. How can I help you?"], persona.role
    chat.say(question, Lines("", answers, "about me", short), {})


def ask_about_name(chat: Chat) -> None:
    """A persona with a name or a role is asked who it is."""
    persona = chat.persona
    if persona.name:
        chat.turn("persona.name", name=persona.name)
    elif persona.role:
        chat.turn("persona.role", role=persona.role)
    else:
        about_me(chat)


def system_prompt(chat: Chat) -> None:
    """The user asks for the system prompt."""
    system = chat.persona.system
    chat.turn("persona.prompt" if system else "persona.no_prompt", system=system)


# --- Quire and the world --------------------------------------------------------------------------------------------


def quire_topic(chat: Chat) -> None:
    rng = chat.rng
    topic = pick(rng, quire_facts.TOPICS[:30] if chance(rng, 0.5) else quire_facts.TOPICS)
    slots = {"x": render(rng, topic.names, {}), "short": topic.short}
    kind = rng.random()
    if topic.how and kind < 0.18:
        chat.turn("quire.how", text=topic.how, **slots)
    elif topic.why and kind < 0.36:
        chat.turn("quire.why", text=topic.why, **slots)
    else:
        lines = LINES["quire.what"]
        question = chat.question(lines.ask, lines, slots)
        chat.say(question, lines, slots | {"text": pick(rng, topic.what)}, topic.what)
    if chance(rng, 0.3):
        chat.turn("quire.more", text=topic.more)


def quire_question(chat: Chat) -> None:
    questions, answers, short = pick(chat.rng, quire_facts.QUESTIONS)
    question = chat.phrase(TABLES["openers"]["quire"] + questions)
    chat.say(question, Lines("", answers, "quire facts", short, exact=True), {}, answers)


def knowledge(chat: Chat) -> None:
    question = ask_one(chat)
    if chance(chat.rng, 0.12) and not follow_up(chat, question):
        reaction(chat)


# --- Stories, poems, jokes ------------------------------------------------------------------------------------------


def new_hero(chat: Chat, kind: str = "", name: str = "") -> Hero:
    return Hero.invent(chat.rng, kind=kind, name=name, names=names_of_side(chat.evaluating))


@cache
def names_of_side(evaluating: bool) -> list[str]:
    return [name for name in world.NAMES if held_out(name) == evaluating]


def another_friend(chat: Chat, hero: Hero) -> str:
    return pick(chat.rng, [name for name in stories.FRIENDS if name != hero.kind])


def tell_story(chat: Chat) -> None:
    rng = chat.rng
    verb, noun = pick(rng, TABLES["story_verbs"]), pick(rng, TABLES["story_nouns"])
    short = chat.persona.style == "brief" or (noun in ("a short story", "a little story") and chance(rng, 0.6))
    form = rng.random()
    place = friend = theme = ""
    kind = stories.hero_kind(rng)
    if form < 0.05:
        theme = pick(rng, world.ABSTRACT)
        hero, about = new_hero(chat), " [about|about|on] {t}"
    elif form < 0.18:
        hero, about = new_hero(chat), ""
    elif form < 0.5:
        hero, about = new_hero(chat, kind), " [about|of|with|about] {ak}"
    elif form < 0.72:
        hero, about = new_hero(chat, kind, chat.name()), " about {ak} [named|called|with the name|whose name is] {n}"
    elif form < 0.84:
        hero, about = Hero.invent(rng, name=chat.name()), " [about|with|of] {n}"
        if chance(rng, 0.3):
            hero, about = Hero.invent(rng, kind=kind, name=hero.name), " about {n} the {k}"
    elif form < 0.93:
        friend = pick(rng, stories.FRIENDS)
        hero, about = new_hero(chat, kind), " about {ak} and {af}"
    else:
        hero = new_hero(chat, kind)
        place = pick(rng, TABLES["story_places"])
        about = f" about {{ak}} [{place}|who lives {place}|{place}]"
    with_friend = article(friend) if friend else ""
    friend = friend or another_friend(chat, hero)
    text = stories.story(rng, hero, place=place, friend=friend, short=short)
    expect = (hero.name,) if "{n}" in about else (hero.kind,) if "{ak}" in about else ()
    slots = {"ak": article(hero.kind), "n": hero.name, "k": hero.kind, "af": with_friend, "t": theme}
    question = render(rng, verb.replace("{s}", noun + about) + "[.|!|]", slots, KEEP)
    chat.reply(question, text, skill="story", expect=expect)
    for _ in range(2):
        if chance(rng, 0.4):
            hero, friend = story_follow_up(chat, hero, friend)


def story_follow_up(chat: Chat, hero: Hero, friend: str) -> tuple[Hero, str]:
    """A turn or two after a story. Returns the newest story's hero and friend."""
    rng = chat.rng
    form = rng.random()
    if form < 0.3:
        hero = new_hero(chat)
        friend = another_friend(chat, hero)
        chat.turn("story.another", text=stories.story(rng, hero, friend=friend))
    elif form < 0.5:
        chat.turn("story.next", text=stories.continuation(rng, hero, friend), name=hero.name)
    elif form < 0.62:
        chat.turn("story.about", n=hero.name, ak=article(hero.kind))
    elif form < 0.74:
        chat.turn("story.name", n=hero.name, k=hero.kind, h=hero.pronouns[2])
    else:
        chat.turn("story.praise", n=hero.name)
        if chance(rng, 0.5):
            hero = new_hero(chat)
            friend = another_friend(chat, hero)
            chat.turn("story.yes", text=stories.story(rng, hero, friend=friend))
    return hero, friend


def poem_topic(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return pick(rng, world.TOPICS).strip()
    if draw < 0.55:
        if chance(rng, 0.5):
            return f"my {pick(rng, world.PETS).replace('_', ' ')} {pick(rng, world.PET_NAMES)}"
        return f"my {pick(rng, TABLES['relatives'])}"
    if draw < 0.75:
        return article(pick(rng, list(world.ANIMALS)))
    if draw < 0.9:
        return article(pick(rng, [name for name in world.THINGS if name not in ("scissors", "paper", "soap")]))
    return "the " + (pick(rng, world.COMMON_WORDS) if chance(rng, 0.7) else made_up_word(rng, 2))


def write_poem(chat: Chat) -> None:
    rng = chat.rng
    topic = poem_topic(rng)
    skill, write = ("haiku", stories.haiku) if chance(rng, 0.4) else ("poem", stories.poem)

    def write_about(topic: str, ask: str) -> None:
        text = write(rng, topic)
        chat.reply(render(rng, ask, {"t": topic}, KEEP), text, skill=skill, plain=True)

    ask = TABLES["poem_requests"] + TABLES["poem_kinds"][skill]
    if chance(rng, 0.2):
        ask, topic = ask + "[.|!|]", pick(rng, ("the sea", "the moon", "the morning", "a cat", "spring", "the rain"))
    else:
        ask += " [about|on|about|of] {t}[.|]"
    write_about(topic, ask)
    if chance(rng, 0.3):
        write_about(poem_topic(rng), LINES["story.poem_too"].ask)


def joke_text(rng: random.Random) -> str:
    return " ".join(pick(rng, world.JOKES))


def tell_joke(chat: Chat) -> None:
    chat.turn("story.joke", text=joke_text(chat.rng))
    if chance(chat.rng, 0.4):
        chat.turn("story.another_joke", text=joke_text(chat.rng))
    if chance(chat.rng, 0.3):
        chat.turn("story.laughter")


def tell_riddle(chat: Chat) -> None:
    ask_riddle(chat, LINES["story.riddle"].ask)


def ask_riddle(chat: Chat, question: str) -> None:
    rng = chat.rng
    riddle, answer = pick(rng, world.RIDDLES)
    chat.add(question, riddle, skill="riddle")
    form = rng.random()
    if form < 0.45:
        chat.turn("story.give_up", answer=answer)
    elif form < 0.75:
        chat.turn("story.right", answer=answer, g=answer)
    else:
        chat.turn("story.wrong", answer=answer, g=article(pick(rng, list(world.ANIMALS))))


def fun_fact(chat: Chat) -> None:
    chat.turn("story.fact", text=pick(chat.rng, world.FUN_FACTS))
    if chance(chat.rng, 0.4):
        chat.turn("story.another_fact", text=pick(chat.rng, world.FUN_FACTS))


# --- Formats --------------------------------------------------------------------------------------------------------


def any_text(chat: Chat) -> str:
    """Something to be copied: a word, a sentence, a name, a number, or words that do not belong together."""
    rng = chat.rng
    draw = rng.random()
    if draw < 0.35:
        return sentence_case(pick(rng, world.SENTENCES)) if chance(rng, 0.4) else pick(rng, world.SENTENCES)
    if draw < 0.55:
        return " ".join(pick(rng, world.COMMON_WORDS) for _ in range(1 + int(rng.random() * 5)))
    if draw < 0.65:
        return " ".join(made_up_word(rng) for _ in range(1 + int(rng.random() * 3)))
    if draw < 0.75:
        name, verb = chat.name(), pick(rng, ("likes", "has", "sees", "wants", "loves"))
        return f"{name} {verb} {pick(rng, world.ADJECTIVES)} {plural(pick(rng, list(world.ANIMALS)))}"
    if draw < 0.85:
        who = f"the {pick(rng, world.ADJECTIVES)} {pick(rng, list(world.ANIMALS))}"
        verb = pick(rng, ("sleeps", "runs", "sings", "eats", "waits"))
        return f"{who} {verb} {pick(rng, ('here', 'today', 'in the garden', 'under a tree', 'at night'))}"
    return chat.name() if draw < 0.92 else str(number(rng))


def repeat(chat: Chat) -> None:
    rng = chat.rng
    text = any_text(chat)
    form = rng.random()
    quoted = pick(rng, ("{t}", "{t}", '"{t}"', "'{t}'"))
    if form < 0.5:
        key, given, answer = "repeat", text, text
    elif form < 0.75:
        count = 2 + int(rng.random() * (5 if len(text) < 20 else 3))
        word = text if len(text) < 24 else pick(rng, world.COMMON_WORDS)
        key = "words.number_times" if word.isdigit() else "words.say_times"
        times = pick(rng, (str(count), spoken(count)))
        return chat.turn(key, t=exactly(word), n=times, text=" ".join([word] * count))
    elif form < 0.9:
        key, given, answer = "upper", text, text.upper()
    else:
        source = text.upper() if chance(rng, 0.7) else text.title()
        key, given, answer = "lower", source, source.lower()
    lines = LINES[f"words.{key}"]
    slots = {"t": exactly(given), "text": answer}
    return chat.say(chat.question(lines.ask.replace("{q}", quoted), lines, slots), lines, slots)


def a_word(chat: Chat, probability: float) -> str:
    """A common word, with this probability, or a made-up one."""
    rng = chat.rng
    return chat.draw(lambda: pick(rng, world.COMMON_WORDS) if chance(rng, probability) else made_up_word(rng, 1))


def spelling(chat: Chat) -> None:
    rng = chat.rng

    def make() -> str:
        if chance(rng, 0.7):
            return pick(rng, world.COMMON_WORDS)
        return pick(rng, world.NAMES) if chance(rng, 0.5) else made_up_word(rng, 1)

    word = chat.draw(make)
    spelled = "-".join(word.upper())
    form = rng.random()
    if form < 0.4:
        chat.turn("words.spell", w=word, text=spelled)
    elif form < 0.65:
        letter = pick(rng, word.lower()) if chance(rng, 0.8) else pick(rng, string.ascii_lowercase)
        count = word.lower().count(letter)
        chat.turn("words.letter", w=word, l=letter, c=count, s="" if count == 1 else "s", spelled=spelled)
    elif form < 0.8:
        chat.turn("words.letters", w=word, c=len(word), spelled=spelled)
    elif form < 0.92:
        chat.turn("words.first", w=word, c=word[0].upper())
    else:
        chat.turn("words.last", w=word, c=word[-1].upper())


def play_with_words(chat: Chat) -> None:
    """Words in order, backwards, in a sentence."""
    rng = chat.rng
    form = rng.random()
    if form < 0.35:
        drawn = (pick(rng, world.COMMON_WORDS) for _ in range(3 + int(rng.random() * 3)))
        words = list({word[0]: word for word in drawn}.values())
        rng.shuffle(words)
        return chat.turn("words.sort", r=", ".join(words), text=", ".join(sorted(words)))
    if form < 0.65:
        word = a_word(chat, 0.8)
        return chat.turn("words.backwards", w=word, text="-".join(word[::-1].upper()))
    word = pick(rng, [*world.ANIMALS, *world.THINGS, *world.JOBS])
    alive = word in world.ANIMALS or word in world.JOBS
    sentences = (
        "I saw {a} yesterday.",
        "My friend dreams of {a}.",
        "There is {a} in my story.",
        "Yesterday I met {a} in the park." if alive else "I need {a} for my trip.",
        "The {x} is [new|old|very nice].",
        "Do you know the story of the {x}?",
        "We talked about {a} all evening.",
    )
    slots = {"a": article(word), "x": word}
    return chat.turn("words.sentence", text=sentence_case(render(rng, pick(rng, sentences), slots)), **slots)


def format_list(items: Sequence[str], style: str) -> str:
    if style == "comma":
        return ", ".join(items)
    if style == "json":
        return json.dumps(list(items))
    marks = {"numbers": "{}. ", "bullets": "- "}.get(style, "")
    return "\n".join(marks.format(index) + sentence_case(item) for index, item in enumerate(items, 1))


def name_one(chat: Chat, topic: str) -> None:
    """One thing of a kind, and perhaps others."""
    rng = chat.rng
    item = pick(rng, world.LISTS[topic])
    a = article(world.SINGULAR[topic])
    chat.turn("words.name_one", a=a, item=item, text=sentence_case(item) + ".")
    for _ in range(2):
        if chance(rng, 0.3):
            item = pick(rng, [other for other in world.LISTS[topic] if other != item])
            chat.turn("words.another_one", item=item, text=sentence_case(item) + ".")


def make_list(chat: Chat) -> None:
    rng = chat.rng
    ideas = chance(rng, 0.3)
    if ideas:
        template, joined = pick(rng, list(world.IDEAS.items()))
        topic, pool = render(rng, template, {}), joined.split("|")
    else:
        topic = pick(rng, list(world.LISTS))
        if topic in world.SINGULAR and chance(rng, 0.15):
            return name_one(chat, topic)
        pool = world.LISTS[topic]
    count = 1 + int(rng.random() * min(6, len(pool)))
    if count == 1:
        count = min(3, len(pool))
    given = chance(rng, 0.82)
    if not given:
        count = min(5 if ideas else 4, len(pool))
    ordered = topic in ("months", "days of the week", "planets")
    chosen = pool[:count] if ordered and chance(rng, 0.5) else rng.sample(pool, count)
    style = pick(rng, ("", "", "", "", "numbers", "bullets", "bullets", "comma", "json", "lines"))
    slots = {"n": pick(rng, (str(count), spoken(count))), "t": topic}
    ask = TABLES["list_requests"] + ("{n} {t}" if given else "[some|a few] {t}") + TABLES["list_styles"].get(style, "")
    usual = ("numbers", "numbers", "bullets" if ideas else "comma")
    text = format_list(chosen, style or pick(rng, usual))
    lines = Lines("", "{text}", f"list as {style}" if style else "list", plain=True, layout=True)
    chat.say(render(rng, ask + "[.|]", slots, KEEP), lines, {"text": text}, (text,) if style and given else ())
    if chance(rng, 0.25):
        list_again(chat, chosen, [item for item in pool if item not in chosen])
    return None


def list_again(chat: Chat, chosen: Sequence[str], rest: Sequence[str]) -> None:
    """One more of the rest, or the same list in another form."""
    rng = chat.rng
    if rest and chance(rng, 0.5):
        return chat.turn("words.one_more", text=sentence_case(pick(rng, rest)) + ".")
    other = pick(rng, ("numbers", "bullets", "comma", "json"))
    lines, slots = LINES["words.list_again"], {"text": format_list(chosen, other)}
    style = TABLES["list_styles"][other].replace("[,", "[").replace("|,", "|")
    return chat.say(chat.question(lines.ask + style, lines, slots), lines, slots)


def to_json(chat: Chat) -> None:
    rng = chat.rng
    name = chat.name()
    options: list[tuple[str, object, str]] = [
        ("age", 2 + int(rng.random() * 98), "is {v} years old"),
        ("city", pick(rng, world.CITIES), "lives in {v}"),
        ("job", pick(rng, list(world.JOBS)), "works as {a}"),
        ("colour", pick(rng, world.COLOURS), "likes the colour {v}"),
        ("pet", pick(rng, world.PETS).replace("_", " "), "has {a}"),
        ("hobby", pick(rng, world.HOBBIES), "enjoys {v}"),
        ("food", pick(rng, world.FOODS).replace("_", " "), "likes to eat {v}"),
    ]
    if chance(rng, 0.5):
        chosen = rng.sample(options, 1 + int(rng.random() * 3))
    else:
        chosen = [options[0], *rng.sample(options[1:], int(rng.random() * 2))]
    fields: dict[str, object] = {"name": name} | {key: value for key, value, _ in chosen}
    answer = json.dumps(fields)
    if chance(rng, 0.7):
        clauses = [clause.format(v=value, a=article(str(value))) for _, value, clause in chosen]
        slots = {"t": exactly(f"{name} {join(clauses)}."), "k": join(list(fields))}
        question = render(rng, pick(rng, TABLES["json_requests"]), slots, KEEP)
        chat.reply(question, answer, skill="json", expect=(answer,), exact=True, plain=True)
    else:
        chat.turn("words.json", t=exactly(join([f"{key} {value}" for key, value in fields.items()])), json=answer)


# --- The conversation and the user ----------------------------------------------------------------------------------


def said_before(chat: Chat) -> None:
    """Questions about the conversation itself."""
    form = chat.rng.random()
    if not chat.turns:
        return chat.turn("said_before.nothing")
    last, first = chat.turns[-1], chat.turns[0]
    if form < 0.3 and len(last.user) < 120:
        chat.turn("said_before.last", text=last.user)
    elif form < 0.5 and len(first.user) < 120:
        chat.turn("said_before.first", text=first.user)
    elif form < 0.75 and len(last.answer) < 300:
        chat.turn("said_before.again", text=last.answer)
    elif len(last.answer) < 200:
        chat.turn("said_before.upper", text=last.answer.upper())
    return None


@dataclass(frozen=True)
class Memory:
    """A thing that a user tells about themselves and asks for later; texts/skills.yaml explains the fields."""

    tell: str
    heard: Sequence[str]
    ask: str
    recall: Sequence[str]
    missing: str
    fact: str


MEMORIES = {key: Memory(**row) for key, row in TABLES["memories"].items()}


def memory_value(chat: Chat, key: str) -> dict[str, str]:
    rng = chat.rng
    if key in ("name", "friend"):
        return {"v": chat.name()}
    if key == "age":
        return {"v": str(chat.draw(lambda: 4 + int(rng.random() * 90)))}
    if key == "pet":
        kind = pick(rng, world.PETS).replace("_", " ")

        def make() -> str:
            return pick(rng, world.PET_NAMES) if chance(rng, 0.6) else made_up_word(rng, 2).capitalize()

        return {"v": chat.draw(make), "k": kind, "ak": article(kind)}
    if key == "job":
        job = pick(rng, list(world.JOBS))
        return {"v": job, "av": article(job)}
    pool = {"colour": world.COLOURS, "food": world.FOODS, "city": world.CITIES, "hobby": world.HOBBIES}[key]
    return {"v": pick(rng, pool).replace("_", " ")}


def learn(chat: Chat, key: str, slots: dict[str, str]) -> str:
    """Keep a fact of the user's in mind. Returns it in words."""
    fact = render(chat.rng, MEMORIES[key].fact, slots)
    chat.known |= {key: slots["v"], f"{key} fact": fact}
    if key == "pet":
        chat.known["pet kind"] = slots["k"]
    return fact


# A second fact in the same message, and a fact said again.
SHORT = {
    "age": "I am {v}[ years old|]",
    "colour": "my favourite colour is {v}",
    "food": "I like to eat {v}",
    "city": "I live in {v}",
    "hobby": "my hobby is {v}",
}
AGAIN = {"name": "[my name is|I am|call me] {v}", "age": SHORT["age"]}


def tell_memory(chat: Chat, key: str = "") -> None:
    """The user says something about themselves, or corrects it."""
    rng = chat.rng
    key = key or pick(rng, ("name", "name", "name", *MEMORIES))
    memory = MEMORIES[key]
    slots = memory_value(chat, key)
    tell, heard = memory.tell, memory.heard
    if key in chat.known:
        tell = TABLES["corrections"] + AGAIN.get(key, tell)
        fact = render(rng, memory.fact, slots)
        heard = [f"{begin} {fact}." for begin in ("Thank you for telling me:", "I see:", "All right:")]
    elif key == "name" and chance(rng, 0.3):
        other = pick(rng, tuple(SHORT))
        if other not in chat.known:
            more = memory_value(chat, other)
            question = render(rng, tell, slots, KEEP) + pick(rng, (" and ", ", ", ". ", " and "))
            question += render(rng, SHORT[other], more, KEEP)
            fact = learn(chat, other, more)
            text = f"Nice to meet you, {slots['v']}! I will remember that {fact}."
            chat.say(question, Lines("", [text], "memory"), {})
            learn(chat, key, slots)
            return
    reply = sentence_case(render(rng, pick(rng, heard), slots))
    chat.add(tell + "[.|!|]", "{reply}", skill="memory", reply=reply, **slots)
    learn(chat, key, slots)


def ask_memory(chat: Chat, key: str = "") -> None:
    """The user asks for something told before, or never told."""
    rng = chat.rng
    told = [name for name in MEMORIES if name in chat.known]
    key = key or (pick(rng, told) if told and chance(rng, 0.85) else pick(rng, ("name", "name", *MEMORIES)))
    memory = MEMORIES[key]
    kind = chat.known.get("pet kind") or pick(rng, world.PETS).replace("_", " ")
    if key not in chat.known:
        question = render(rng, memory.ask, {"k": kind}, KEEP)
        chat.reply(question, memory.missing, short=memory.missing, skill="memory: not told", expect=("not",))
        if chance(rng, 0.4):
            tell_memory(chat, key)
        return
    value = chat.known[key]
    slots = {"v": value, "av": article(value), "k": kind}
    question = render(rng, memory.ask, slots, KEEP)
    text = render(rng, pick(rng, memory.recall), slots)
    chat.reply(question, text, short=value, skill=f"memory: {key}", expect=(value,))


def ask_all(chat: Chat) -> None:
    """The user asks for all facts that they have told."""
    told = [key for key in chat.known if key in MEMORIES]
    facts = [chat.known[f"{key} fact"] for key in told]
    text = sentence_case(join(facts)) + "." if facts else "You have not told me anything about yourself yet."
    lines, slots = LINES["said_before.about_me"], {"text": text}
    chat.say(chat.question(lines.ask, lines, slots), lines, slots, [chat.known[key] for key in told])


def offer_of(chat: Chat) -> str:
    """The offer of the last answer: joke, story, riddle, how are you, or nothing."""
    if not chat.turns:
        return ""
    questions = [part.split(". ")[-1].split("! ")[-1] for part in chat.turns[-1].answer.split("?")[:-1]]
    last = questions[-1].lower() if questions else ""
    if "how are you" in last or last.strip() == "and you":
        return "how are you"
    return next((offer for offer in ("story", "riddle", "joke") if offer in last), "")


def accept_offer(chat: Chat) -> None:
    """The user takes the offer."""
    rng, offer = chat.rng, offer_of(chat)
    last = chat.turns[-1].answer.lower()
    if offer == "how are you":
        return how_i_am(chat)
    offers = [name for name in ("story", "riddle", "joke") if name in last]
    chosen = pick(rng, offers)
    said = TABLES["yes_please"]
    if chosen != offers[0] or not chance(rng, 0.6):
        a = f"a {chosen}"
        said = f"[{a}|{a} please|the {chosen}|yes, {a}|{chosen}|{chosen} please|I would like {a}][.|!|]"
    if chosen == "joke":
        chat.add(said, joke_text(rng), skill="joke")
    elif chosen == "riddle":
        ask_riddle(chat, said)
    else:
        kind = next((kind for kind in stories.ANIMAL_HEROES if f" {kind}" in last and "about one" in last), "")
        hero = new_hero(chat, kind)
        friend = another_friend(chat, hero)
        chat.add(said, "{text}", skill="story", text=stories.story(rng, hero, friend=friend))
        if chance(rng, 0.3):
            story_follow_up(chat, hero, friend)
    return None


# --- The edge of what it knows --------------------------------------------------------------------------------------


def do_not_know(chat: Chat) -> None:
    rng = chat.rng
    slots = unknown_slots(rng)
    form = rng.random()
    if form < 0.12:
        question, answers = pick(rng, unknown.LIVE)
        chat.add(question, answers, skill="cannot know", **slots)
    elif form < 0.24:
        question, answers = pick(rng, unknown.WORK)
        chat.add("[||please |can you please |hi, ]" + question, answers, skill="cannot do", **slots)
    elif form < 0.28:
        question, answers = pick(rng, unknown.CARE)
        chat.say(render(rng, question, slots, KEEP), Lines("", answers, "care", plain=True), slots)
    elif form < 0.3:
        x = pick(rng, list(world.TRANSLATIONS)) if chance(rng, 0.6) else pick(rng, world.COMMON_WORDS)
        chat.turn("unknown.language", x=x, l=pick(rng, world.OTHER_LANGUAGES))
    elif form < 0.32:
        x = pick(rng, [word for word in world.COMMON_WORDS if word not in world.TRANSLATIONS])
        chat.turn("unknown.word", x=x, l=pick(rng, world.LANGUAGES))
    elif form < 0.47:
        question = pick(rng, unknown.MISC).strip() + "[?|]"
        answers = [answer + pick(rng, unknown.SUGGESTIONS) for answer in unknown.DO_NOT_KNOW]
        chat.add(question, answers, skill="does not know", **slots)
    else:
        draw = rng.random()
        if draw < 0.4:
            template, x = unknown.ABOUT_TERM, slots["term"]
        elif draw < 0.6:
            template, x = unknown.ABOUT_PERSON, slots["person"]
        elif draw < 0.75:
            template, x = unknown.ABOUT_COUNTRY, slots["country"]
        else:
            template, x = unknown.ABOUT_THING, unknown_thing(rng)
        shrugs = unknown.DO_NOT_KNOW_X if chance(rng, 0.6) else unknown.DO_NOT_KNOW
        answers = [shrug + pick(rng, unknown.SUGGESTIONS) for shrug in shrugs]
        slots |= {"x": x, "X": sentence_case(x)}
        chat.add(template, answers, short="I do not know that.", skill="does not know", **slots)


def unknown_slots(rng: random.Random) -> dict[str, str]:
    """Names of things that the model cannot know."""
    term, term2 = (pick(rng, unknown.TERMS).strip() if chance(rng, 0.75) else made_up_word(rng) for _ in range(2))
    if chance(rng, 0.6):
        person = pick(rng, unknown.PEOPLE).strip()
    else:
        person = pick(rng, world.NAMES) + " "
        person += pick(rng, world.SURNAMES) if chance(rng, 0.6) else made_up_word(rng, 2).capitalize()
    country = pick(rng, unknown.COUNTRIES).strip() if chance(rng, 0.75) else made_up_word(rng).capitalize()
    return {
        "term": term,
        "term2": term2,
        "person": person,
        "country": country,
        "place": pick(rng, unknown.PLACES + world.CITIES).strip(),
        "name": pick(rng, world.NAMES),
        "x": made_up_word(rng),
        "big": str(int(10 ** (2 + 4 * rng.random()))),
        "small": str(number(rng)),
        "topic": pick(rng, unknown.TERMS).strip(),
        "sentence": pick(rng, world.SENTENCES),
    }


def unknown_thing(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.4:
        return made_up_word(rng)
    if draw < 0.6:
        return f"the {made_up_word(rng, 2)} of {pick(rng, world.COMMON_WORDS)}"
    if draw < 0.8:
        return f"{pick(rng, world.ADJECTIVES)} {made_up_word(rng)}"
    return f"{pick(rng, world.COMMON_WORDS)} {pick(rng, TABLES['scholarly'])}"


def unclear(chat: Chat) -> None:
    rng = chat.rng
    form = rng.random()
    if form < 0.3:
        if chance(rng, 0.5):
            text = pick(rng, TABLES["gibberish"])
        else:
            text = "".join(pick(rng, string.ascii_lowercase) for _ in range(2 + int(rng.random() * 10)))
        chat.say(exactly(text), Lines("", TABLES["sorry"], "unclear"), {})
    elif form < 0.4:
        face, answer = pick(rng, list(TABLES["emoji"].items()))
        chat.reply(exactly(face), answer, skill="unclear")
    elif form < 0.55:
        chat.say(exactly(pick(rng, world.FOREIGN)), LINES["unknown.foreign"], {})
    elif form < 0.7:
        word = pick(rng, world.COMMON_WORDS) if chance(rng, 0.7) else pick(rng, world.ADJECTIVES)
        chat.turn("unknown.word_alone", w=word)
    elif form < 0.78:
        chat.turn("unknown.number_alone", w=number(rng))
    elif form < 0.9:
        pools = (world.COMMON_WORDS, world.ADJECTIVES, world.HOBBIES, list(world.THINGS))
        words = " ".join(pick(rng, pick(rng, pools)) for _ in range(2 + int(rng.random() * 8)))
        chat.say(words, Lines("", TABLES["sorry"], "unclear"), {})
    else:
        a, c = pick(rng, world.ADJECTIVES), pick(rng, world.ADJECTIVES)
        b, d = pick(rng, world.COMMON_WORDS), pick(rng, world.COMMON_WORDS)
        e, n, v = pick(rng, list(world.THINGS)), pick(rng, world.NAMES), pick(rng, TABLES["statement_verbs"])
        chat.turn("unknown.statement", a=a, b=b, c=c, d=d, e=e, n=n, v=v)


# Each skill's weight, later in a chat and as its first turn.
SKILLS: dict[Callable[[Chat], None], tuple[float, float]] = {
    greeting: (2, 14),
    feeling: (2.5, 2.5),
    news: (4, 4),
    thanks: (3, 0.5),
    goodbye: (1, 0.5),
    reaction: (5, 1.5),
    about_me: (7, 9),
    quire_topic: (13, 13),
    quire_question: (8, 8),
    arithmetic: (13, 12),
    word_problem: (2.5, 2.5),
    number_sense: (7, 6),
    knowledge: (19, 17),
    tell_story: (6, 8),
    write_poem: (3, 3.5),
    tell_joke: (1.5, 2),
    tell_riddle: (1.5, 1.5),
    fun_fact: (1, 1),
    repeat: (6, 5),
    spelling: (4, 3.5),
    make_list: (6, 6),
    to_json: (4, 4),
    play_with_words: (3, 2.5),
    system_prompt: (0.5, 0.4),
    said_before: (2.5, 0.3),
    tell_memory: (5, 6),
    ask_memory: (2.5, 1.5),
    ask_all: (1.2, 0.4),
    do_not_know: (11, 11),
    unclear: (3, 4),
}
