"""The words that fill the slots of word problems."""

from __future__ import annotations

WOMEN = (
    "Mia Anna Emma Lily Zoe Ruth Nora Clara Iris Alice Maya Julia Sofia Hanna Ada Agnes Aisha Alma Amara Amelia Amy "
    "Angela Anita Anja Ava Beatrice Bella Bertha Bianca Carla Carmen Carol Cecilia Celine Chloe Claire Cora Daisy "
    "Dana Daria Diana Dora Edith Elena Elisa Ella Elsa Emily Erika Esther Eva Fatima Fiona Flora Freya Gina Gloria "
    "Grace Greta Gwen Hazel Heidi Helen Hilda Ida Ines Ingrid Irene Isabel Ivy Jana Jane Jasmine Joan Judith June "
    "Karen Katya Kira Lara Laura Layla Lea Lena Linda Lisa Lola Louise Lucia Lucy Luna Lydia Magda Maria Marta Mary "
    "Matilda Mina Miriam Molly Mona Nadia Naomi Nell Nina Olga Olivia Paula Petra Priya Rachel Rita Rosa Sally Sara "
    "Selma Stella Susan Tara Tess Tina Uma Vera Viola Wanda Yara Yuki Zara"
).split()
MEN = (
    "Tom Ben Leo Max Paul Omar Noah Luke Felix Oscar Hugo Simon David Ivan Aaron Abel Adam Adrian Alan Albert Alex "
    "Ali Amir Andre Anton Arno Arthur Axel Boris Bruno Caleb Carl Chen Chris Cyril Dan Daniel Dario Dean Dennis Dev "
    "Diego Edgar Edwin Eli Elias Emil Eric Ethan Evan Finn Frank Fred Gabriel Gary George Gerald Gil Glen Gustav Hans "
    "Harold Harry Hassan Henry Herman Igor Isaac Ismael Jack Jacob Jakub James Jan Jason Jens Jim Joel John Jonas "
    "Jorge Jose Joseph Juan Julian Karim Kevin Kofi Kurt Lars Leon Levi Liam Linus Lorenz Louis Marco Mark Martin "
    "Mateo Matthew Milan Milo Moses Nick Nico Niels Nils Olaf Oliver Otto Owen Pablo Pedro Peter Philip Pierre Rafael "
    "Ralph Raul Ravi Ray Rene Robert Robin Roland Roman Ryan Sam Samir Sasha Scott Sean Stefan Steve Sven Theo Tim "
    "Tobias Victor Vincent Walter Yusuf"
).split()
ITEMS = (
    "apples pears plums lemons oranges peaches cherries nuts carrots potatoes tomatoes onions cookies muffins candies "
    "eggs books pencils pens stamps stickers cards marbles buttons beads shells stones feathers ribbons balloons "
    "candles cups plates spoons flowers seeds leaves toys dolls kites magnets badges almonds anchors apricots arrows "
    "avocados bagels bananas bandages bats beans beets bells belts berries blankets blocks blouses boats bolts "
    "bookmarks boots bottles bowties bracelets brushes bulbs cabbages cacti cakes calendars cameras canes canvases "
    "caps charms chestnuts chisels clams clips clocks clovers coats coconuts combs cones corks crackers crayons cubes "
    "cucumbers cupcakes curtains cushions daisies dates diaries dice donuts drums earrings envelopes erasers fans "
    "figs files flags flutes forks fossils frames gems globes gloves goblets grapes guitars hammers handles hats "
    "helmets herbs hinges hooks horns jackets jewels keys kettles knobs ladders lamps lanterns laces lilies limes "
    "lockets locks maps masks mats medals melons mirrors mittens mugs mushrooms nails napkins necklaces needles "
    "notebooks notes oars olives paddles paintings pancakes papayas parcels patches pearls peas pebbles peppers "
    "photos pies pillows pins pinecones pipes pliers poems postcards posters pots pretzels pumpkins puppets puzzles "
    "quilts quinces radishes raisins rings robots rocks ropes roses rulers sandals sandwiches scarves screws shirts "
    "shoes skirts socks songs statues sticks straws strings sunflowers tacos tapes teapots tents tickets ties tiles "
    "tools towels trophies truffles tulips turnips umbrellas vases violets waffles walnuts watches wheels whistles "
    "wreaths yoyos acorns aprons artichokes axes bricks brooches buns burritos cables candlesticks canoes carpets "
    "chairs chalks chimes cloaks coasters collars compasses corals costumes couplers crystals diamonds doorknobs "
    "dumplings emeralds fences figurines flasks gadgets gowns grapefruits gears harps hoops icicles ladles leeks "
    "lollipops mangoes marigolds muskets nectarines nuggets orchids oysters pecans pendants plugs prunes puddings "
    "rackets rubies saddles sapphires scissors sculptures shovels skates skewers slippers sponges spools stools "
    "teacups thimbles tomes trinkets tubes vests violins wagons wallets zippers"
).split()
PLACES = (
    "market park library station museum beach farm fair bakery harbor garden river bridge theater castle airport "
    "attic barn bay cabin cafe camp canal cave chapel church cinema circus clinic corner court creek dock factory "
    "ferry field forest fountain gallery gate gym hall hill hospital hostel hotel inn island kiosk lake lighthouse "
    "mall meadow mill mine monument office orchard palace pier plaza pond pool port restaurant road shop shore square "
    "stadium stream street studio subway temple tower town tunnel valley village well workshop yard zoo"
).split()
CONTAINERS = (
    "bags boxes baskets jars crates packets bowls buckets trays sacks cartons drawers chests tins barrels bins cases "
    "cans folders pouches purses racks stacks suitcases trunks tubs"
).split()
MONEY = "coins dollars euros tokens points".split()
GROUPS = {
    "children": "child", "friends": "friend", "neighbors": "neighbor", "cousins": "cousin", "classmates": "classmate",
    "students": "student", "players": "player", "guests": "guest", "teachers": "teacher", "actors": "actor",
    "artists": "artist", "bakers": "baker", "brothers": "brother", "campers": "camper", "clowns": "clown",
    "cooks": "cook", "dancers": "dancer", "doctors": "doctor", "drivers": "driver", "farmers": "farmer",
    "gardeners": "gardener", "hikers": "hiker", "knights": "knight", "nurses": "nurse", "painters": "painter",
    "pilots": "pilot", "pirates": "pirate", "runners": "runner", "sailors": "sailor", "singers": "singer",
    "sisters": "sister", "swimmers": "swimmer", "tourists": "tourist", "visitors": "visitor", "workers": "worker",
}  # fmt: skip
