# ruff: noqa: E501 - a pattern or a list reads best on one line
"""Word lists and the syllable generator that supply names, places and words to spell."""

from __future__ import annotations

import random

WORDS: tuple[str, ...] = tuple(
    sorted(
        set(
            """
able acid acorn actor adapt admit adult after again agent agree ahead aim air alarm album alert alike alive alley
allow alone alpha amber amuse angel anger angle ankle apple apron arch arena argue arm army arrow art ash aside ask
atlas atom attic aunt avoid awake award axis baby back bacon badge bag bake baker ball balm band bank barn base basil
basin basket bat bath beach bead beam bean bear beard beast beat beaver bed bee beef begin bell below belt bench berry
best big bike bind birch bird bit black blade blame blank blaze blend bless blind block bloom blow blue blunt board
boat body bold bolt bone bonus book boot born boss both bottle bottom bowl box boy brace brain brake branch brand brass
brave bread break breeze brick bride bridge brief bring broad broom brown brush bubble bucket bud build bulb bunch
burn bush busy butter button cabin cable cactus cage cake calf call calm camel camp can canal candle candy canoe canvas
cap cape car carbon card care cargo carpet carrot carry cart carve case cash castle cat catch cave cedar cell center
chain chair chalk chance change charm chart chase cheap check cheek cheese cherry chess chest chief child chin choir
circle city civil clay clean clear clever cliff climb cloak clock cloth cloud clover club coach coal coast coat cobra
cocoa code coffee coin cold color comet comic cook cookie cool copper coral cord corn corner cotton couch count cousin
cover cow crab craft crane crate crayon cream creek crisp crop cross crow crowd crown cruise crust cube cup curl curve
cycle daily dairy daisy dance danger dark dash date dawn day deal deep deer delay delta denim dense depth desert desk
dew dial diary dice diet dig digit dinner dirt dish dive dock doctor dog doll donkey door dot double dough dove dozen
draft dragon drama draw dream dress drift drill drink drive drop drum dry duck dune dust duty eager eagle ear early
earn earth east easy echo edge eel egg eight elbow elder elm ember empty energy enjoy enter equal escape even event
exact exit extra eye fable fabric face fact fade fair fairy faith fall fame family fan farm fast father feast feather
fence fern ferry fever fiber field fig film find fine finger fire firm first fish fist flag flame flash flat fleet
flight flint float flock flood floor flour flower fluid flute fly foam focus fog fold folk food foot forest fork form
fort fossil found fox frame free fresh friend frog front frost fruit fuel full funny fur galaxy game garage garden
garlic gate gather gem gentle ghost giant gift ginger girl give glad glass globe glory glove glow glue goal goat gold
good goose grab grace grain grand grape grass gravel gray great green grid grill grip ground group grove grow guard
guess guest guide guitar gull gym habit hair half hall hammer hand happy harbor hard harp hat hatch haven hawk hazel
head heart heat heavy hedge heel hero heron hill hint hive hobby hold hole hollow holly home honest honey hood hook
hope horn horse host hotel hour house hover human humor hunt hut ice icon idea igloo image inch index ink inlet inn
input insect iris iron island item ivory ivy jacket jade jam jar jaw jazz jeans jelly jewel job join joke jolly journey
joy judge juice jump jungle junior jury kayak keen keep kettle key kick kid kind king kiss kit kite kitten knee knife
knight knit knock knot koala label lace ladder lady lake lamb lamp land lane laptop large laser late laugh laurel lava
lawn layer lazy leaf learn leather left leg legend lemon lend lens letter level lever light lilac lily lime linen lion
lip liquid list little live lizard loaf lobby local lock lodge log long look loom loop loud love loyal lucky lunar lunch
lung lynx magic magnet maid mail main maker mango manor map maple marble march mare mark market marsh mask mast match
maze meadow meal mean meat medal melon melt member menu mercy merit merry metal meter mild milk mill mind mine mint
minute mirror mist mix model modern moment monkey moon moose moral morning moss motel moth mother motor mount mouse
mouth move movie mud muffin mule museum music nail narrow nation native nature navy near neck needle nest net never new
next nice night nine noble noise noodle noon north nose notch note novel nugget number nurse nut oak oar oasis oat
object ocean olive onion open opera orange orbit orchid order organ otter outer oval oven owl owner oxygen oyster pack
paddle page pail paint pair palace palm panda panel paper parade parent park parrot party pasta paste patch path pause
peace peach peak pear pearl pebble pedal pen pencil penny pepper perch petal phone photo piano picnic piece pigeon pilot
pillow pin pine pink pipe pirate pixel pizza place plain plan plane planet plank plant plate play plaza plum plus pocket
poem poet point polar pole polish pond pony pool poppy porch port potato pouch powder power press pretty price pride
prince print prism prize proof proud public pull pulse pump pupil puppet puppy purple purse puzzle quail quartz queen
quest quick quiet quilt quiz rabbit race radar radio raft rail rain raise ranch range rapid raven ray razor reach ready
real rebel recipe record red reef relax remote rent rescue rest ribbon rice rich ride ridge right ring ripple rise river
road roast robin robot rock rocket roll roof room root rope rose rough round route royal ruby rug ruler rural rust
saddle safe sail salad salmon salt same sample sand satin sauce savor scale scarf scene school score scout screen scroll
sea seal season seat second secret seed sense serve seven shade shadow shape share shark sharp sheep shelf shell shield
shine ship shirt shoe shore short shovel show shy side sign silk silver simple sing sister six size skate sketch skill
skin sky slate sleep sleeve slice slide slope slow small smart smile smoke smooth snack snail snake snow soap soccer
sock sofa soft soil solar solid son song sonic sort soul sound soup south space spade spark speed spell spice spider
spin spiral splash spoon sport spot spring spruce square squid stable stack stage stair stamp stand star start state
statue steam steel stem step stick still stone stool stop store storm story stove straw stream street string strong
studio style sugar suit summer sun sunny sunset super surf swan sweet swift swim swing switch sword symbol syrup table
tail talent talk tall tango tank tape target taste tax tea teach team temple ten tennis tent test text thank theme thick
thin thorn thread three throne thumb thunder ticket tide tidy tie tiger tile timber time tin tiny tire title toast toe
token tomato tone tool tooth top topaz torch total touch towel tower town toy track trade trail train travel tray treat
tree trial tribe trick trip trophy trout truck true trumpet trunk trust truth tube tulip tuna tundra tunnel turkey turn
turtle twin twist two type uncle under union unit upper urban urn useful valley value valve van vase vault velvet
vendor verse vessel vest video view villa vine violet violin visit vivid voice volume vote voyage wagon waist wait walk
wall walnut walrus wand warm wash wasp watch water wave wax weaver web week whale wheat wheel whip white wide wild
willow win wind window wine wing winter wire wise wish wolf wonder wood wool word work world worm worth woven wrap wren
wrist write yard yarn year yellow yoga young zebra zero zinc zone zoo
""".split()
        )
    )
)

NAMES: tuple[str, ...] = tuple(
    """
Ada Alan Alice Amir Ana Anna Arjun Ben Bella Bob Boris Carl Carla Carmen Chen Chloe Clara Dan Daniel David Diego Elena
Eli Ella Emil Emma Eric Erik Eva Farah Felix Fiona Frank Fritz Grace Greta Hana Hans Harry Hugo Ida Igor Ines Ivan Jack
James Jane Jin John Jonas Julia Karim Karl Kate Kim Lara Laura Leo Lena Liam Lily Linda Lisa Lucas Lucy Luis Luna Maria
Mark Marta Martin Mary Max Mia Mila Milo Mina Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Peter Petra
Priya Rafael Rita Robert Rosa Ruth Sam Sara Simon Sofia Sven Tara Theo Thomas Tina Tom Uma Vera Victor Yara Yuki Zoe
""".split()
)

CITIES: tuple[str, ...] = tuple(
    line.strip()
    for line in """
Amsterdam, Athens, Austin, Bangkok, Barcelona, Basel, Beijing, Bergen, Berlin, Bern, Bogota, Boston, Bristol, Brussels,
Budapest, Cairo, Cape Town, Chicago, Cologne, Copenhagen, Dakar, Dallas, Delhi, Denver, Dresden, Dubai, Dublin,
Edinburgh, Florence, Frankfurt, Geneva, Genoa, Ghent, Glasgow, Hamburg, Hanoi, Helsinki, Istanbul, Jakarta, Kyoto, Lagos,
Leipzig, Lima, Lisbon, London, Los Angeles, Lyon, Madrid, Manila, Marseille, Melbourne, Mexico City, Miami, Milan,
Montreal, Moscow, Mumbai, Munich, Nairobi, Naples, New York, Nice, Osaka, Oslo, Ottawa, Oxford, Paris, Perth, Porto,
Prague, Quito, Riga, Rio, Rome, Rotterdam, San Francisco, Santiago, Seattle, Seoul, Seville, Shanghai, Singapore, Sofia,
Stockholm, Sydney, Tallinn, Tokyo, Toronto, Turin, Valencia, Vancouver, Venice, Vienna, Vilnius, Warsaw, York, Zagreb,
Zurich
""".replace("\n", " ").split(",")
)

_ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sh sl sp st th tr wh".split()
_VOWELS = "a e i o u a e i o u ai ea ee oo ou".split()
_CODAS = ["", "", "", *"b d f g k l m n p r s t ck ll nd ng nt rd rn sh ss st".split()]


def made_up_word(rng: random.Random, shortest: int = 3, longest: int = 6) -> str:
    """Return a pronounceable lower-case word, real or not, of the wanted length."""
    while True:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 1, 2)))
        )
        if shortest <= len(word) <= longest:
            return word


def made_up_name(rng: random.Random) -> str:
    """Return a pronounceable capitalised name."""
    return made_up_word(rng, 3, 8).capitalize()
