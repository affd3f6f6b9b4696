"""Short stories and poems from plots and couplets with slots."""

# ruff: noqa: E501, SIM905
# fmt: off

from __future__ import annotations

import random
from dataclasses import dataclass

from demo.grammar import article, chance, made_up_word, pick, render, sentence_case
from demo.world import FEMALE_NAMES, NAMES, PET_NAMES

ANIMAL_HEROES = """cat dog mouse rabbit fox bear owl frog duck hedgehog squirrel penguin elephant lion tiger wolf horse pony donkey sheep goat pig hen
bee ant snail turtle bird crow parrot monkey koala panda kangaroo dolphin whale fish octopus crab kitten puppy dragon unicorn dinosaur hamster
butterfly spider deer zebra giraffe camel crocodile bat seal swan goose""".split()
SHE_PEOPLE = "girl queen princess witch grandmother woman".split()
HE_PEOPLE = "boy king prince wizard knight grandfather man".split()
PEOPLE = """baker farmer teacher sailor painter gardener doctor pilot astronaut fisherman shepherd pirate detective clown musician student
programmer scientist cook librarian inventor postman singer dancer child""".split()
THINGS = """robot car train boat ship kite lamp clock teapot toaster cloud star snowman tree computer pencil book rocket balloon umbrella token
tractor bus lighthouse spoon sock shoe chair candle leaf stone pumpkin cookie moon ghost alien monster fairy giant""".split()

PLACES = """in a small village|in a green forest|in a quiet valley|in a big city|in a house by the sea|in a little house on a hill|in an old castle|on a farm|
in a town by a river|on an island|in a garden full of flowers|high in the mountains|in a harbour town|in a wooden hut|in a street of little shops""".replace("\n", "").split("|")
FRIENDS = "mouse owl rabbit fox frog squirrel duck hedgehog sparrow goat turtle crow".split()
FOODS = "bread|apples|soup|honey cake|berries|pancakes|cheese|a warm pie|nuts|cookies".split("|")
TREASURES = "key|box|map|letter|bell|ring|lantern|coin|shell|book".split("|")
WISHES = """swim:lake:swam across the whole lake|sing:meadow:sang a song for the whole village|paint:window:painted the sunset in ten colours|
dance:barn:danced until the stars came out|bake bread:oven:baked the best bread in town|climb:tall oak:climbed to the very top|
fly a kite:hill:flew the kite higher than the roofs|play the drum:barn:played a rhythm that made everyone dance|
skate:frozen pond:skated in a perfect circle|read:window:read a whole book aloud to the neighbours""".replace("\n", "").split("|")
FEARS = """the dark:It is only the day with its eyes closed|thunder:It is only the clouds clapping their hands|deep water:Water carries those who move gently|
high places:Look at the next step, not at the ground|strangers:Every friend was a stranger once|the night:The moon is a lamp that never goes out""".replace("\n", "").split("|")
TITLES = "brave|little|kind|curious|clever|shy|cheerful|gentle|sleepy|old|young|friendly|tiny|quiet|lively".split("|")


@dataclass
class Hero:
    """Who a story is about: kind is a noun such as "cat", name a first name."""

    kind: str
    name: str
    pronouns: tuple[str, str, str]  # he, him, his

    @classmethod
    def invent(cls, rng: random.Random, kind: str = "", name: str = "", names: list[str] | None = None) -> Hero:
        if not kind:
            female = name in FEMALE_NAMES
            people = [*PEOPLE, *(["girl"] * 6 if female else ["boy"] * 6)]
            kind = pick(rng, people if name else pick(rng, (ANIMAL_HEROES, ANIMAL_HEROES, people, SHE_PEOPLE + HE_PEOPLE, THINGS)))
        gender = "she" if kind in SHE_PEOPLE else "he" if kind in HE_PEOPLE else pick(rng, ("she", "he"))
        if name and kind not in SHE_PEOPLE + HE_PEOPLE:
            gender = "she" if name in FEMALE_NAMES else "he"
        if not name:
            pool = PET_NAMES if kind in ANIMAL_HEROES and chance(rng, 0.5) else names or NAMES
            matching = [known for known in pool if (known in FEMALE_NAMES) == (gender == "she")]
            name = pick(rng, matching or pool)
        return cls(kind, name, ("she", "her", "her") if gender == "she" else ("he", "him", "his"))


OPENINGS = [
    "[Once upon a time|Once upon a time|Once|Long ago|A long time ago], there was {a_title_kind} named {name}[ who lived {place}|]. ",
    "{Place} there lived {a_title_kind} named {name}. ",
    "{name} was {a_title_kind} who lived {place}. ",
]

# Each plot is a run of sentences. `{he}` begins in lower case; `{He}` begins a sentence.
PLOTS = [
    # A lost thing is found
    "[One morning|One day|One windy morning], {name} could not find {his} [favourite|little|old] {treasure}. {He} looked [under the bed|behind the door|in every corner], but it was not there. "
    '[A {friend} saw|A {friend} noticed] how sad {name} was and said, "[Let us look together|Two can look better than one]!" They searched [by the river|in the tall grass|behind the old wall] until the sun was low. '
    "[At last|Then] something shone [in the leaves|between two stones]. It was the {treasure}! {name} thanked the {friend}, and [from that day on they were best friends|they shared {food} to celebrate].",
    # Lost on the way home
    "One evening, {name} walked too far and lost the way home. [It grew dark|The sky turned dark|Fog came up], and every path looked the same. "
    '{He} sat down on a stone and [did not know what to do|listened to the wind]. Then a {friend} came by and asked, "Why are you so quiet?" "I am lost," said {name}. '
    '"[Follow me|Come with me]," said the {friend}, "I know every [path|stone] here." Together they walked [through the trees|over the hill|along the river] until they saw a warm light. '
    "{name} was home again, and {he} never forgot the kind {friend}.",
    # Learning by practice
    "{name} wanted to learn how to {skill} more than anything. {He} went to the {skill_place} every day and tried. The first time it went wrong, and [some laughed|everybody laughed]. "
    'The second time it went wrong too. "[Keep trying|Do not give up]," said [an old {friend}|a wise {friend}], "[every master was a beginner once|small steps go far]." '
    "So {name} tried again and again. One fine day {he} {skill_done}. [Everybody cheered|Now nobody laughed], and {name} [smiled from ear to ear|was proud and happy].",
    # A fear is overcome
    "{name} was brave in many things, but {he} was afraid of {fear}. [One night|One day] {his} friend, a {friend}, needed help and called for {name}. "
    '{His} heart beat fast. Then {he} remembered what {his} grandmother used to say: "{fear_words}." {name} took a deep breath and went, [one step at a time|slowly, but without stopping]. '
    "{He} found the {friend}, and they [went home together|laughed with relief]. After that, {fear} did not seem so bad.",
    # A found thing brings a surprise
    '[One day|One morning], {name} found an old {treasure} [under a tree|on the beach|in the attic|by the road]. There was a note with it: "[Bring me to the tower|Bring me to the oldest tree|Take me to the end of the path]." '
    "{name} was curious and set out at once. On the way {he} met a {friend} who [wanted to come along|asked to come too]. When they arrived, [a door opened|a small door opened in front of them], "
    'and behind it stood a table with {food} for two. "[Thank you for bringing it back|You are honest and kind]," said a friendly voice. [They ate and laughed until evening|It was the best meal of their lives].',
    # A race
    "Every year there was a race in {his} home town, and this time {name} wanted to win. At the start, a [fast|proud] {friend} ran ahead and laughed. "
    "Halfway there, {name} saw that the {friend} had fallen and hurt a foot. {He} could have run on and won. But {name} stopped and helped, and they crossed the line together, [last of all|slowly, side by side]. "
    'The crowd [clapped louder than ever|stood up and cheered]. "You have won something better than a race," said the {friend}. "You have won a friend."',
    # A storm
    "One night a great storm came. The wind [howled|roared] and the rain [fell like a curtain|beat against the windows]. {name} heard a small knock at the door. "
    'Outside stood a {friend}, wet and cold. "Come in," said {name}, and gave the guest {food} and a blanket. Soon there was another knock, and another, until the whole house was full of [wet animals|guests]. '
    "They told stories until morning. When the sun came out, {name} had [more friends than chairs|many new friends].",
    # A gift returns
    "One cold day, {name} had only {food_little} left. On the road {he} met a hungry {friend}. {name} thought for a moment and then [gave half of it away|shared it]. "
    '"I will not forget this," said the {friend}. Months later, {name} [fell into a deep hole|was caught in the snow|lost {his} way in the mountains] and called for help. '
    'It was the {friend} who [heard {him}|came] and brought help. "[A good deed comes back|Kindness comes back]," said the {friend}, and {name} [smiled|nodded].',
    # A new friend
    "{name} was new there and did not know anybody. Every day {he} [sat alone by the well|watched the others play] and felt lonely. One day {he} heard somebody cry. "
    'It was a little {friend} whose kite was stuck in a tree. {name} climbed up and [brought it down|got it back]. "[Thank you|You are so kind]! Do you want to play with me?" asked the {friend}. '
    "They played until the evening. {name} was not lonely [any more|after that].",
    # The forgotten birthday
    "It was {his} birthday, but nobody said a word about it. {name} [waited all morning|looked sadly out of the window] and thought that everybody had forgotten. "
    'In the afternoon a {friend} came and said, "[Come quickly|Please come], I need your help in the barn!" {name} went along. When {he} opened the door, all {his} friends [jumped up|called out], "Happy birthday!" '
    "There was music, and there was {food}. It was the best day of the year.",
    # Something is repaired
    "One day the big clock in the tower stopped, and nobody knew what time it was. [The baker baked at night|Breakfast came in the evening], and the rooster slept until noon. "
    '{name} climbed up the tower to look. Inside the clock {he} found a {friend} [asleep|fast asleep] between the wheels. "I am sorry," said the {friend}, "it was so warm in here." '
    "{name} laughed, found it a better bed, and the clock began to tick again. Everybody was glad, and [breakfast was in the morning again|the bells rang all day].",
    # A seed
    '{name} got a tiny seed as a present. "Plant it and be patient," said the old {friend}. {name} planted it and gave it water every day. Nothing happened for a week, and nothing for a month. '
    "[Others said it was a waste of time|Some laughed about it], but {name} went on. In spring a green leaf came out of the ground. Years later it was a great tree, and "
    "[everybody sat in its shade|children played under it]. {name} was glad that {he} had waited.",
    # A star
    "Every night {name} looked at the brightest star and wished to hold it. One night the star fell down and landed in {his} garden. It was small and warm, but its light grew weak. "
    '"I miss the sky," whispered the star. {name} was sad, but {he} wanted to help. With the help of a {friend}, {he} climbed the highest hill and [threw the star up|lifted the star] as high as {he} could. '
    "The star flew home. Since then it blinks twice every night, just for {name}.",
    # A rescue
    "[One afternoon|One day], {name} heard a faint voice. A {friend} was stuck [in a net|under a branch|in the mud] and could not get free. {name} [pulled with all {his} strength|worked for an hour], but it did not help. "
    'Then {he} had an idea. {He} called all the neighbours, and they pulled together: one, two, three! The {friend} was free. "Alone I was too weak," said {name}, "but together we are strong."',
    # A contest
    "There was a great contest for the best cake in town. {name} had never baked before, but {he} wanted to try. {He} mixed [flour, eggs and honey|flour, milk and apples] and forgot the sugar. "
    'The cake came out [flat|crooked] and a little burnt. {name} brought it anyway. The judge, a strict {friend}, took a bite and began to [smile|laugh]. "It is not the prettiest," said the {friend}, '
    '"but I can taste that you made it with joy." {name} won the prize for courage and shared the cake with everybody.',
    # Treasure
    'One day {name} found a map with a red cross on it. "A treasure!" {he} cried and packed {food} for the way. {He} walked over three hills and across a river. '
    'A {friend} joined {him} and told funny stories all the way. At the red cross they dug and dug. They found only a box with a note: "[Look beside you|Look who is next to you]." '
    "{name} looked at the {friend} and understood: the treasure was the friend {he} had found.",
    # The small one saves the day
    "The others often said that {name} was too small to help. One day the [key of the town fell into a narrow crack|bridge had a hole that nobody could reach|bell was stuck and could not ring]. The big ones tried, but they were [too large|too heavy]. "
    '"Let me try," said {name}. {He} [slipped through the gap|climbed up carefully] and did it in a minute. Everyone was amazed. "[Small can be great|It is good to be small sometimes]," said the {friend}, and nobody laughed at {name} again.',
    # Boasting
    '{name} liked to say, "I can do everything better than you!" One day a quiet {friend} asked, "Can you also be silent?" {name} laughed. "Of course!" '
    "But after a minute {he} had to tell everybody how silent {he} was. They all laughed, and in the end {name} laughed too. From then on {he} [listened more|asked the others what they could do], and {he} learned something new every day.",
    # No sleep
    "One night {name} could not sleep. {He} counted to one hundred, but it did not help. {He} drank warm milk, but it did not help. So {he} went outside and found a {friend} who could not sleep either. "
    "They sat down side by side and looked at the moon. They [told each other about their day|spoke about small things]. After a while it became very quiet, because both had fallen asleep.",
    # The letter
    'One day {name} got a letter without a name. It said, "[You are a good friend|Thank you for being you]." {name} was happy, but who had written it? {He} asked the {friend}, who shook its head. '
    "{He} asked everybody in town, and each of them got a smile and a kind word. In the evening {name} still did not know. So {he} wrote a letter without a name to somebody else. Soon the whole town was full of kind letters.",
    # The machine
    '{name} built a machine that could do only one thing: make bubbles. "What is it good for?" asked the {friend}. "Nothing," said {name}, "but look!" The bubbles flew over the roofs and shone in all colours. '
    'People stopped working and looked up, and [even the grumpy mayor smiled|for a moment nobody was in a hurry]. "Now I know what it is good for," said the {friend}.',
    # The snow
    "The first snow of the year had fallen, and everything was white and quiet. {name} went out and left the first tracks in the snow. Soon {he} saw other tracks beside {his} own. "
    '{He} followed them [over the field|around the house|through the trees] and found a {friend} who was building a snowman. "It needs a nose," said the {friend}. {name} ran home and brought a carrot. '
    "When the moon came up, the snowman seemed to smile at them both.",
    # The secret garden
    "Behind an old wall {name} found a garden that nobody cared for. The flowers were dry and the well was full of leaves. {name} came back every day and worked [a little|for an hour]. "
    'A {friend} began to help, and then another. In summer the garden was full of roses and bees. They put a sign on the gate: "[Everybody is welcome|Come in, it belongs to all of us]."',
]

ENDINGS = ["", "", "", "", " The end.", " And they lived happily ever after.", " That night {name} slept very well.", " And if you listen closely, you can still hear {name} laugh."]

CONTINUATIONS = [
    'The next day, {name} woke up early and went to see the {friend}. "What shall we do today?" asked {name}. "Let us visit the old mill," said the {friend}. They walked there together, ate {food} in the sun, and came home tired and happy.',
    'Some days later, {name} got a visit from the {friend}. They had {food} and talked about everything that had happened. "Next time we will go even further," said {name}, and both of them laughed.',
    "After that, {name} told the story to everybody who wanted to hear it. The {friend} always added a funny detail. And each time they told it, it became a little longer.",
    "Then winter came, and {name} stayed at home by the fire. One evening the {friend} knocked at the door with {food}. They sat together until late and made plans for the spring.",
    "Years later, {name} still thought of that day. {He} often sat with the {friend} in the evening sun, and they smiled about how it all began.",
]


def story(rng: random.Random, hero: Hero, *, place: str = "", friend: str = "", theme: str = "", short: bool = False) -> str:
    """A whole story of about four to ten sentences about the hero."""
    slots = story_slots(rng, hero, place=place, friend=friend)
    opening = render(rng, pick(rng, OPENINGS[1:] if place else OPENINGS), slots)
    if theme:
        opening = f"This is a story about {theme}. {opening}"
    if short:
        body = pick(rng, SHORT_PLOTS)
        return opening + render(rng, body, slots)
    return opening + render(rng, pick(rng, PLOTS), slots) + render(rng, pick(rng, ENDINGS), slots)


SHORT_PLOTS = [
    "{He} dreamed of seeing the sea. One day {he} packed {food} and walked until {he} heard the waves. It was even more beautiful than in the dream.",
    'One day {he} met a {friend} who had no home. "Stay with me," said {name}. So both of them had a home and a friend.',
    "{He} planted one flower every day. After a year the whole place was in bloom, and everybody smiled.",
    "One night {he} saw a falling star and made a wish. In the morning a {friend} stood at the door and wanted to be friends. The wish had come true.",
    '{He} lost {his} {treasure} and found a {friend} instead. "That is a good trade," said {name}.',
]


def continuation(rng: random.Random, hero: Hero, friend: str) -> str:
    return render(rng, pick(rng, CONTINUATIONS), story_slots(rng, hero, friend=friend))


def story_slots(rng: random.Random, hero: Hero, *, place: str = "", friend: str = "") -> dict[str, str]:
    he, him, his = hero.pronouns
    skill, skill_place, skill_done = pick(rng, WISHES).split(":")
    fear, fear_words = pick(rng, FEARS).split(":")
    if not friend:
        friend = pick(rng, FRIENDS)
        while friend == hero.kind:
            friend = pick(rng, FRIENDS)
    title = pick(rng, TITLES)
    kind = hero.kind if chance(rng, 0.25) or hero.kind.startswith(title) else f"{title} {hero.kind}"
    where = place or pick(rng, PLACES)
    return {
        "name": hero.name, "a_title_kind": article(kind), "he": he, "him": him, "his": his, "He": he.capitalize(), "His": his.capitalize(),
        "place": where, "Place": sentence_case(where), "friend": friend, "food": pick(rng, FOODS), "food_little": "a little bread", "treasure": pick(rng, TREASURES),
        "skill": skill, "skill_place": skill_place, "skill_done": skill_done, "fear": fear, "fear_words": fear_words,
    }


COUPLETS = [
    "I think of {t} at break of day,\nand all my worries drift away.",
    "There is a song in {t}, I know,\nsometimes fast and sometimes slow.",
    "Oh {t}, how you make me smile,\nso stay with me a little while.",
    "The world is wide, the sky is blue,\nand {t} is here for me and you.",
    "When evening comes and lights are low,\nI dream of {t} and let all go.",
    "I saw {t} in morning light,\nso calm and clear, so soft and bright.",
    "Some look for gold, some look for fame,\nbut {t} is my favourite name.",
    "The clock may tick, the rain may fall,\nbut {t} is best of all.",
    "I wrote a line, I wrote it true:\nthere is no day without {t} and you.",
    "The birds all sing, the children play,\nand {t} brightens up the day.",
    "When winter comes with frost and snow,\nthe thought of {t} makes me glow.",
    "In spring, when all the flowers bloom,\nI think of {t} in my room.",
    "If I could have one wish tonight,\nit would be {t}, warm and bright.",
    "A little word, a little rhyme,\nfor {t} I always have the time.",
    "The stars above, the earth below,\nthey tell of {t} and softly glow.",
    "My heart is light, my step is free,\nfor {t} means so much to me.",
    "I close my eyes and hear the sea,\nand {t} is there, along with me.",
]

HAIKU = [
    "Thinking of {t},\na quiet breath, a soft light,\nand the day begins.",
    "Morning light is here.\nI look for {t} and find\na small, silent joy.",
    "The wind tells a tale\nof {t} and of old days.\nThen it moves along.",
    "Soft rain on the roof.\nIn my mind {t} appears\nand stays for a while.",
    "One leaf falls slowly.\nI think of {t} tonight.\nThe moon says nothing.",
    "Still water, blue sky.\nSomewhere {t} is waiting.\nI walk on, smiling.",
    "A path in the snow.\nIt leads me to {t} again.\nMy steps are quiet.",
    "Evening settles in.\nThe last light touches {t}.\nStars begin to sing.",
]

TOPIC_HAIKU = {
    "the sea": ["The waves come and go.\nSalt on my lips, sand on feet.\nThe sea breathes slowly."],
    "the moon": ["A lamp in the dark,\nthe moon walks over the roofs\nand asks for nothing."],
    "winter": ["White fields, silent trees.\nA crow calls across the snow.\nWinter holds its breath."],
    "spring": ["The first bud opens.\nA bee looks in and hums twice.\nSpring is here at last."],
    "summer": ["Warm grass, a long day.\nThe cricket plays the same song.\nSummer has no clock."],
    "autumn": ["Red leaves on the path.\nThe wind turns page after page.\nAutumn reads aloud."],
    "the rain": ["Rain on the window.\nEach drop runs its own small race.\nAll of them arrive."],
    "snow": ["Snow falls in the night.\nThe town wakes under a sheet\nthat nobody wrote."],
    "a cat": ["The cat in the sun\nopens one eye, closes it.\nNothing has happened."],
    "a GPU": ["Fans hum in the dark.\nTen thousand threads lift one stone.\nA token appears."],
    "paged attention": ["Block after small block,\nthe table knows where they lie.\nNo gap is wasted."],
    "a computer": ["A cursor that blinks.\nIt waits for me patiently.\nI have no idea."],
    "the night": ["The street lamps hum low.\nA window is still yellow.\nSomeone cannot sleep."],
    "a river": ["The river runs on.\nIt takes the sky on its back\nand carries it home."],
    "the forest": ["Moss under my feet.\nThe old trees speak without words.\nI answer softly."],
    "coffee": ["Steam above the cup.\nThe morning begins to talk\nafter the first sip."],
}


def poem(rng: random.Random, topic: str) -> str:
    """Four rhyming lines about the topic."""
    first, second = rng.sample(COUPLETS, 2)
    lines = f"{first}\n{second}".replace("{t}", topic).split("\n")
    return "\n".join(sentence_case(line) if index % 2 == 0 else line for index, line in enumerate(lines))


def haiku(rng: random.Random, topic: str) -> str:
    own = TOPIC_HAIKU.get(topic)
    text = pick(rng, own) if own and chance(rng, 0.7) else pick(rng, HAIKU).replace("{t}", topic)
    return "\n".join(sentence_case(line) if index == 0 else line for index, line in enumerate(text.split("\n")))


def hero_kind(rng: random.Random) -> str:
    """A noun that a user may ask a story about, at times one that does not exist."""
    kinds = pick(rng, (ANIMAL_HEROES, ANIMAL_HEROES, SHE_PEOPLE + HE_PEOPLE, PEOPLE, THINGS))
    return pick(rng, kinds) if chance(rng, 0.95) else made_up_word(rng, 2)
