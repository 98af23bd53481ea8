"""The texts behind the demo data, all written for this project: ticket parts, reference paragraphs, quiz pairs.

Tickets: `CORES[intent][split]` holds sentence templates with {slot} fields that carry the meaning; the splits share no template, so a test
ticket is never a refilled training ticket. `DISTRACTORS[intent]` use the vocabulary of an intent while ruling it out; they are put
into tickets of *other* intents, so that counting keywords is not enough. `REFERENCE_TEXT` is paragraphs parted by blank lines,
`BENCHMARK_TEXT` one `question|answer` a line.
"""

from __future__ import annotations

SLOTS: dict[str, tuple[str, ...]] = {
    "host": tuple(f"{kind}-{number:02d}" for kind in ("web", "app", "batch", "node", "edge", "cache") for number in (1, 3, 7, 12, 18)),
    "service": (
        *("checkout", "billing", "search", "the mail relay", "the ticket portal", "the image resizer", "inventory", "the login page"),
        *("the report builder", "payroll", "the metrics collector", "the chat bot", "the price feed", "the media encoder"),
    ),
    "database": ("orders", "customers", "ledger", "telemetry", "catalogue", "sessions", "shipments", "audit"),
    "team": ("the finance team", "the night shift", "the data team", "our partners", "the warehouse", "the mobile team", "support"),
    "person": ("Amina", "Jonas", "Priya", "Wei", "Lucía", "Tomás", "Ingrid", "Kofi", "Maren", "Yusuf", "Odile", "Dmitri"),
    "place": ("staging", "production", "the Dublin site", "the test cluster", "the second region", "the lab", "the Oslo data centre"),
    "time": ("this morning", "last night", "at 03:10", "at lunch", "around 9 pm", "on Tuesday", "an hour ago", "at midnight"),
    "version": ("2.4.1", "3.0", "1.18.7", "v56", "the September build", "5.2-rc1", "the hotfix", "0.9.3"),
    "number": ("3", "5", "12", "17", "28", "40", "75", "90"),
    "path": ("/var/log", "/srv/uploads", "/data", "/tmp", "/opt/cache", "the shared volume"),
    "domain": ("api.example.com", "shop.example.org", "the internal wiki", "the vendor gateway", "the status page", "mail.example.net"),
}

OPENERS: tuple[str, ...] = (
    *("Hi,", "Hello team,", "Good morning.", "Hey folks,", "Hi all, sorry to bother you.", "Urgent!", "FYI:", "Dear on-call,"),
    *("Hello, {person} here from {team}.", "Quick one:", "Could somebody have a look please?", "Reporting this for {team}."),
    *("I hope this is the right queue.", "Second attempt, my first ticket was closed.", "{person} asked me to file this."),
)

CLOSERS: tuple[str, ...] = (
    *("Thanks!", "Please advise.", "Many thanks, {person}", "Can someone help?", "Not sure who owns this.", "Regards, {person}"),
    *("This blocks {team}.", "Happy to join a call.", "We have a demo tomorrow.", "Customers have started to notice.", "Any idea?"),
    *("It was fine {time}.", "Let me know what you need from me.", "Cheers", "I can wait until Monday.", "Priority is up to you."),
)

CONTEXT: tuple[str, ...] = (
    *(
        "Nothing was changed on our side.",
        "We only noticed because {team} called.",
        "{person} already rebooted it once.",
        "It is in {place}.",
    ),
    *("The dashboard for {service} is green.", "I am new here, so forgive the wording.", "We saw {number} tickets like this in spring."),
    *("The machine is {host}.", "This concerns {service}.", "This comes from {team}.", "The office move is on Friday by the way."),
)

CORES: dict[str, dict[str, tuple[str, ...]]] = {
    "disk full": {
        "train": (
            "Writing to {path} on {host} fails with 'no space left on device'.",
            "{path} is at 100% and {service} cannot store anything any more.",
            "Log rotation stopped, so {path} has grown until nothing more fits.",
            "We ran out of room on {host}: every new file ends up with zero bytes.",
            "The volume behind {service} has {number} kilobytes left.",
            "Uploads to {service} are refused because the storage on {host} is used up.",
            "df shows no free blocks on {path} and the journal is read-only now.",
            "Old core dumps have eaten the whole partition of {host}.",
            "{service} crashed {time} while saving a file, the drive has no capacity left.",
            "There are so many tiny files in {path} that the inodes are gone.",
            "Please extend the volume of {host}, it filled up {time}.",
            "The {database} database stopped accepting writes since its tablespace cannot grow on the drive.",
        ),
        "validation": (
            "{host} has nowhere to put its logs, the partition is stuffed.",
            "Saving anything under {path} gives an error about missing free blocks.",
        ),
        "test": (
            "Somebody left {number} gigabytes of videos in {path} and now not one more byte can be saved.",
            "The drive of {host} is packed to the brim, even touch fails.",
            "We need a bigger volume or a clean-up: {service} can no longer append to its files.",
            "{host} shows 0 bytes free and spooling for {service} halted {time}.",
        ),
    },
    "certificate expired": {
        "train": (
            "Browsers warn that {domain} is not secure, its validity ended {time}.",
            "The TLS certificate of {domain} ran out {time}.",
            "Clients refuse to talk to {domain}: x509 says it is no longer valid.",
            "curl complains that the notAfter date of {domain} lies in the past.",
            "The automatic renewal for {domain} did not happen and the padlock is gone.",
            "Our monitoring says the chain for {domain} lapsed {number} days ago.",
            "The signing key pair for {service} was only good until yesterday.",
            "Handshakes with {domain} break off since the issuer's intermediate is out of date.",
            "{person} forgot to renew the cert for {domain} before the holiday.",
            "Mobile apps cannot trust {domain} any more because the cert is stale.",
            "Let's encrypt could not renew {domain}, so it is past its end date.",
            "Every https call from {service} to {domain} is rejected as untrusted since midnight when the validity period ended.",
        ),
        "validation": (
            "{domain} presents a cert that should have been replaced {number} days ago.",
            "SSL errors for everybody on {domain}, the renewal was missed.",
        ),
        "test": (
            "A red warning page appears on {domain}, it says the site's identity was valid only up to {number} days ago.",
            "Please reissue the cert of {domain}, partners get handshake alerts for an outdated one.",
            "Nobody replaced the x509 file on {host} in time and now every TLS client of {service} balks.",
            "openssl prints 'verify error: has expired' when we probe {domain}.",
        ),
    },
    "slow query": {
        "train": (
            "The monthly report on {database} takes {number} minutes instead of seconds.",
            "A select over {database} scans every row since the index was dropped.",
            "{service} waits ages for {database}; the statement plan changed {time}.",
            "Joining {database} with the archive table never seems to finish.",
            "The SQL behind {service} went from 20 ms to {number} seconds.",
            "One statement holds locks on {database} for {number} minutes and everybody queues behind it.",
            "Statistics of {database} are stale, so the planner picks a nested loop.",
            "Filtering by date in {service} is painfully sluggish, explain shows a sequential scan.",
            "The {database} database is busy sorting millions of rows for a single page view.",
            "Since {version} the listing in {service} runs the same lookup {number} times per row.",
            "Could you add an index for {database}? The lookup by customer crawls.",
            "The lookup in {database} used to be instant; now it needs {number} seconds per call.",
        ),
        "validation": (
            "Fetching one customer's history from {database} takes forever.",
            "The planner of {database} ignores the index and reads the complete table.",
        ),
        "test": (
            "Opening the overview in {service} means {number} seconds of staring while {database} reads the complete table.",
            "Explain analyze on {database} shows a full scan where an index used to help.",
            "Aggregating last year's rows in {database} has become unbearably long-winded since {version}.",
            "The top statement in {database} eats {number} seconds per execution, it was milliseconds {time}.",
        ),
    },
    "out of memory": {
        "train": (
            "The kernel killed {service} on {host}, the oom killer left a note in dmesg.",
            "{service} grows by {number} MB an hour until the container is shot.",
            "Pods of {service} restart with exit code 137 over and over.",
            "The Java heap of {service} is exhausted and it dies with an allocation error.",
            "{host} starts swapping like mad as soon as {service} loads its model.",
            "We see 'cannot allocate' in the output of {service} before each crash.",
            "There is a leak in {service} since {version}: RAM never goes down again.",
            "The worker on {host} used {number} GB of RAM and got killed.",
            "Loading the big spreadsheet makes {service} hit its limit and the cgroup stops it.",
            "{service} needs a higher RAM limit, it is reaped {time} again.",
            "malloc returns null in {service} after {number} hours of uptime.",
            "Garbage collection in {service} runs all the time and the heap is still at its ceiling.",
        ),
        "validation": (
            "{service} is shot by the kernel whenever it caches too many objects.",
            "The resident set of {service} climbs until {host} kills it.",
        ),
        "test": (
            "{service} keeps eating RAM after {version} until the node reaps the process.",
            "Exit code 137 again on {host}; the heap graph of {service} only goes up.",
            "Python raised MemoryError in the batch step of {service} {time}.",
            "{host} had to kill {service} because it wanted {number} GB and the limit is lower.",
        ),
    },
    "network timeout": {
        "train": (
            "Connections from {host} to {domain} hang and give up after {number} seconds.",
            "{service} cannot reach {domain}, the packets vanish somewhere.",
            "Ping from {place} to {host} loses {number} percent.",
            "The socket to {domain} never gets an answer, the client gives up waiting.",
            "Calls between {service} and {domain} stall, traceroute ends at the firewall.",
            "DNS for {domain} takes so long that {service} aborts.",
            "The VPN tunnel to {place} drops every {number} minutes.",
            "{service} logs 'connect timed out' for {domain} {time}.",
            "A switch in {place} flaps and {host} is unreachable half of the time.",
            "Latency to {domain} jumped to {number} seconds and requests are cut off.",
            "No route to {host} from {place} since the router was swapped.",
            "TCP handshakes with {host} stay half open until they are abandoned.",
        ),
        "validation": (
            "Packets from {place} to {domain} get lost, so {service} stops waiting.",
            "{host} can be reached from {place} only now and then.",
        ),
        "test": (
            "Nothing comes back from {domain} when {service} calls it, after {number} seconds it hangs up.",
            "The line between {place} and {host} is flaky, half of the packets never arrive.",
            "From {host} I cannot get through to {domain}, telnet just sits there.",
            "Requests leave {service} but the far end of the tunnel to {place} stays silent.",
        ),
    },
    "access denied": {
        "train": (
            "{person} gets a 403 when opening {service}.",
            "I am not allowed to read {path} on {host} although I was last week.",
            "My account lacks the role for {service}, could you grant it?",
            "{person} joined {team} and cannot sign in to {service} yet.",
            "sudo on {host} says I am not in the sudoers file.",
            "The robot user of {service} may no longer write to the {database} database.",
            "After the group clean-up {team} lost its rights on {path}.",
            "{service} rejects my token as unauthorized {time}.",
            "ssh to {host} answers 'permission denied (publickey)' for {person}.",
            "We need read rights on {database} for {team}.",
            "The button for approvals is greyed out for {person}, probably a missing role.",
            "The bucket policy forbids {service} to list its own objects.",
        ),
        "validation": (
            "{person} is locked out of {service} after moving to {team}.",
            "The policy on {path} forbids what {team} is supposed to do.",
        ),
        "test": (
            "{service} tells {person} 'you are not authorized to view this page'.",
            "Could {team} be added to the group that may edit {path}?",
            "My key is refused on {host} since the role change {time}.",
            "{person} needs the permission to see {database}, right now it is forbidden.",
        ),
    },
    "failed deployment": {
        "train": (
            "Rolling out {version} of {service} stopped half way and was rolled back.",
            "The pipeline for {service} is red: {version} never reached {place}.",
            "The new release of {service} does not pass its health check in {place}.",
            "Helm upgrade of {service} to {version} ended with an error.",
            "The image for {version} cannot be pulled, so {service} stays on the old build.",
            "We pushed {version} to {place} and the migration step broke.",
            "{service} still shows the old build although the release job ran {time}.",
            "The canary of {version} was aborted, {number} percent of pods came up.",
            "Shipping {version} to {place} fails at the smoke test.",
            "The release train for {service} is stuck at stage {number}.",
            "A typo in the manifest of {version} makes the rollout of {service} invalid.",
            "Terraform apply for {service} stopped with {number} resources missing.",
        ),
        "validation": (
            "The release job of {service} gave up before {version} was live.",
            "{version} could not be installed in {place}, the pipeline stopped at stage {number}.",
        ),
        "test": (
            "We cannot get {version} live: the rollout in {place} reverts itself each time.",
            "The CI job that ships {service} turned red at the last stage {time}.",
            "New pods of {service} with {version} never become ready, so the release was reverted.",
            "Upgrading {service} to {version} in {place} broke off and we are back on the previous build.",
        ),
    },
    "backup failed": {
        "train": (
            "The nightly copy of {database} was not made {time}.",
            "There is no snapshot of {database} newer than {number} days.",
            "The dump of {database} stops at {number} percent every night.",
            "Restoring {database} is impossible, the last archive is corrupt.",
            "The tape job for {host} reported an error {time}.",
            "Snapshots of {host} have been skipped since {person} left.",
            "The archive of {path} from {time} has zero bytes.",
            "We wanted to restore {path} and found that nothing had been saved for {number} weeks.",
            "Replication of the {database} copies to {place} has not run.",
            "The checksum of the weekly archive for {service} does not match.",
            "pg_dump for {database} quits early and leaves half a file.",
            "The retention job removed the only good snapshot of {database}.",
        ),
        "validation": (
            "The last good archive of {database} is {number} weeks old.",
            "Nightly snapshots of {path} are skipped without a word.",
        ),
        "test": (
            "If {database} broke now we could not recover it: the newest usable dump is {number} days old.",
            "The job that archives {path} each night ended in error {time}.",
            "A restore drill for {service} showed that the saved copies cannot be read.",
            "Nothing was copied off {host} during the nightly save window, the snapshot list is empty.",
        ),
    },
}

DISTRACTORS: dict[str, tuple[str, ...]] = {
    "disk full": (
        "There is plenty of free space on the disk, I checked.",
        "This is not the full volume from last month.",
        "{path} is only {number}% used.",
        "The storage extension of {host} was done and is fine.",
    ),
    "certificate expired": (
        "The certificate is valid for another {number} months.",
        "It has nothing to do with the TLS renewal of {domain}.",
        "The expired cert from spring was replaced long ago.",
        "https itself works and the chain is trusted.",
    ),
    "slow query": (
        "The queries on {database} are fast, by the way.",
        "The index on {database} is in place, so it is not the slow report again.",
        "SQL times look normal.",
        "I know about the sluggish select in {service}, that is another ticket.",
    ),
    "out of memory": (
        "Memory on {host} is fine, only {number} percent used.",
        "It was not killed and there is no leak this time.",
        "RAM was doubled {time}, so that cannot be it.",
        "The heap looks healthy.",
    ),
    "network timeout": (
        "The network is fine, ping to {host} works.",
        "No timeouts or packet loss that I can see.",
        "The connection to {domain} is up and quick.",
        "We ruled out the firewall and the router.",
    ),
    "access denied": (
        "Permissions were checked by {person} and are right.",
        "I do have the role and can log in.",
        "It is not about access rights this time.",
        "Nobody gets a 403, the account is fine.",
    ),
    "failed deployment": (
        "The deployment of {version} went through without problems.",
        "We have not released anything since {version}.",
        "The rollout {time} was green, so ignore the pipeline.",
        "No new build is involved.",
    ),
    "backup failed": (
        "A fresh backup exists, so feel free to experiment.",
        "The snapshot {time} was good.",
        "We could restore {database} from the nightly dump if needed.",
        "Backups of {host} are current.",
    ),
}

REFERENCE_TEXT = """
A river carries more than water. Each spring the melting snow loosens gravel from the slopes, and the current rolls it along the bed
until the stones are round and smooth. Where the valley widens the flow slows down, the load sinks, and banks of sand appear that
were not there the year before. Over centuries the whole channel wanders across the plain like a slow snake.

Bread needs only flour, water, salt and time. When the dough rests, yeast turns sugar into gas, and the elastic web of gluten holds
the bubbles in place. A long, cool rise gives more flavour than a short, warm one, because bacteria have time to make mild acids. In
the oven the crust browns as sugars and proteins react in the heat.

Light from the sun needs a little more than eight minutes to reach us. On a clear evening the low rays cross a longer stretch of
air, which scatters the blue part aside and leaves orange and red. Dust and smoke deepen the colours. After the disk has set, the
upper atmosphere still catches some light, and for half an hour the sky glows above a dark horizon.

The old library in our town stands on a hill behind the market. Its reading room has tall windows, long oak tables and a clock that
has been five minutes slow for as long as anybody can remember. Students come in the morning, pensioners read the newspapers after
lunch, and in the late afternoon children whisper between the shelves while they wait for their parents.

Bees find their way by the position of the sun and by landmarks that they learn on short flights around the hive. A forager that has
discovered good flowers returns and dances on the comb. The angle of her run tells the others the direction, and its length tells
them how far to fly. Within minutes dozens of workers set off towards the same meadow.

A bicycle is stable mainly because it steers into a fall. When it leans to the left, the front wheel turns left by itself, the path
curves, and the frame comes upright again. Riders make these corrections without thinking. At very low speed the effect is weak,
which explains why beginners wobble most when they try to go slowly.

Markets bring buyers and sellers together, yet they rarely agree on what a thing is worth. The farmer remembers the dry summer and
the cost of seed; the cook looks at the soft tomatoes and thinks of the evening menu. They settle on a price that neither loves.
Tomorrow, with rain in the forecast and fewer crates on the carts, it will be another one.

Salt lowers the temperature at which water freezes. On a winter road the grains dissolve in the thin film on top of the ice, and the
brine stays liquid below zero. The colder it gets, the more salt is needed, until at about twenty degrees of frost it hardly helps.
Sand does not melt anything, but it gives tyres something to grip.

The violin maker taps the thin spruce plate and listens. A clear ring means that the wood is stiff and light; a dull thud tells her
to shave a little more from the middle. No drawing can replace this ear, which she trained for eleven years. When the varnish is
dry, the instrument will need months of playing before its tone opens.

Volcanoes grow where melted rock finds a way to the surface. Thin lava runs far and builds broad, gentle shields, while sticky lava
piles up in steep domes and can block its own vent. Gas trapped below such a plug gathers pressure. When the plug fails, ash may
rise higher than airliners fly and drift around the globe for weeks.

Learning a language as an adult is a matter of patience. Grammar can be explained in an afternoon, but the ear must hear a phrase
many times before it sounds natural. It helps to read easy stories, to speak with kind strangers, and to accept mistakes with good
humour. One day a joke is funny without translation, and that is a small victory.

The heart of a resting adult beats about seventy times a minute and moves five litres of blood in that time. Its own pacemaker cells
set the rhythm, while nerves and hormones speed it up or slow it down. During a hard climb the flow can rise fivefold. Trained
hearts are larger and do the same work with fewer, stronger strokes.

Maps always leave something out. A plan of the underground shows the order of stations but bends their distances; a hiking map shows
every contour and forgets the opening hours of the hut. The art lies in choosing what the reader needs at this moment. A map that
showed everything would be as large as the country and just as hard to fold.

Tides follow the moon. Its pull is a little stronger on the near side of the earth than on the far side, so the oceans bulge in two
places, and the turning planet carries each coast through both bulges in about a day. Where the sea floor narrows into a funnel the
water climbs high. Fishermen have kept tables of these hours for centuries.

Glass is made from sand, soda and lime that are heated until they flow. As the melt cools it becomes stiffer and stiffer without
ever forming crystals, so its atoms stay as disordered as in a liquid. Slow cooling removes hidden stresses. A pane that was cooled
too fast may stand for months and then crack because of a warm hand.

My grandfather kept pigeons on the flat roof of his house. Every evening he climbed the narrow stairs with a tin of corn, whistled
twice and waited with his face to the wind. The birds came in from the harbour, turned once above the chimneys and landed all
together. He said that they were better company than most of his neighbours.

Computers store numbers as patterns of two states. With a handful of such switches one can count, with millions one can keep a
library. The machine itself has no notion of what a pattern stands for; the same bits may be a letter, a colour or the pitch of a
note. Meaning comes from the program that reads them and from the people who use it.

Mountain weather changes quickly. Warm air climbs the sunny slopes before noon, cools as it rises, and builds white towers above the
ridge. By three o'clock the towers may be dark, and by four there is thunder. Experienced walkers start before dawn, reach the
summit early, and are drinking tea in the valley while the first drops fall on the rocks.

A good question is often worth more than a quick answer. In the workshop the apprentice asked why the hinge was fitted from the
left, and nobody could tell him. They tried it the other way round and saved an hour each day. Habits have reasons when they begin,
but the reasons may leave quietly while the habits stay.

Plants breathe through tiny pores on the lower side of their leaves. When the pores are open, carbon dioxide can enter and water
vapour escapes; when they are closed, the leaf saves water but goes hungry. Cacti solve the problem by opening at night. They store
what they have taken in as an acid and use it the next day behind shut doors.

The night train left at ten past eleven with two sleeping cars and a dining car that served nothing but soup. Rain ran in slanted
lines across the window. Somewhere beyond the border the wheels changed their song, and a guard walked along the corridor with a
lamp. When we woke up, the fields were flat and a stork stood beside a canal.

Sound travels faster in water than in air, and faster still in steel. The reason is not density but stiffness: a stiff material
passes a push on to its neighbour with little delay. That is why a railway worker could hear a distant train by laying an ear on the
rail long before the air brought any noise to him.

Vaccines show the body a harmless piece of an invader. Some immune cells recognise it, multiply and make antibodies, and a few of
them remain for many years as a memory. If the real germ arrives later, the answer comes within hours rather than weeks. When enough
people are protected, the germ finds no path from one person to the next.

Paper was once made from old rags. Collectors went from door to door, and mills soaked, beat and pressed the fibres into sheets that
have lasted five hundred years. When newspapers wanted more than the rag trade could give, wood took over. It was cheap and white,
but the acid left in it made the pages brown and brittle after a generation.

The goalkeeper has two tenths of a second to decide. She cannot watch the ball and then jump, so she reads the hips and the last
step of the striker and leaves the ground before the kick. Half of the time she is wrong and looks foolish. Standing still would
save more shots than people think, but nobody would forgive it.

Deserts are not always hot. The dry valleys of the far south see almost no snow, because cold air holds little moisture and the
mountains take the rest. Wind polishes the stones and dries the bodies of lost seals. A few kinds of moss and very small worms live
there, asleep for most of the year and awake for some damp days.

Money in a jar and money in a bank are different things. The bank lends most of what it holds, trusting that not everybody will come
on the same day. As a rule the trust is justified, and the loan builds a house or buys a boat. When doubt spreads, the queue at the
counter becomes the very trouble that people feared.

An orchestra tunes to the oboe, since its pitch is steady and its tone cuts through the noise. First the winds take the note, then
the strings, and for a moment the hall is filled with one bright, uncertain sound. The conductor waits behind the door. When it is
quiet she walks in, bows, lifts her hands, and nobody breathes.

Concrete hardens by a reaction with water, not by drying. Crystals grow between the grains of cement and lock sand and gravel
together. If the surface dries too soon the growth stops and dust remains, so builders spray it or cover it with wet cloth. After a
month it has most of its strength, but the slow gain goes on for years.

Cats sleep for two thirds of the day and hunt mostly at dusk. Their eyes need only a sixth of the light that ours need, thanks to a
mirror behind the retina. Whiskers measure gaps in the dark. Even a well-fed cat will stalk a moving leaf, since the wish to hunt
does not depend on hunger, and kittens practise it from their fifth week.

The first clocks in town halls had one hand only. Hours were enough for people who lived by daylight and bells. With railways came
the need for minutes, and with it a quarrel about whose noon should count. In the end whole countries agreed on a common time, and
the sundial on the church wall became a decoration that is always a little wrong.

Steel rusts when iron meets oxygen and water together. The reddish flakes take more room than the metal did, so they lift the paint
and let in more damp. A thin coat of zinc protects even where it is scratched, as the zinc gives way first. Bridges are painted from
one end to the other, and by then the first end needs paint again.
"""

BENCHMARK_TEXT = """
What is the capital of France?|Paris
What is the capital of Italy?|Rome
What is the capital of Spain?|Madrid
What is the capital of Germany?|Berlin
What is the capital of Japan?|Tokyo
What is the capital of China?|Beijing
What is the capital of Russia?|Moscow
What is the capital of Egypt?|Cairo
What is the capital of Greece?|Athens
What is the capital of Portugal?|Lisbon
What is the capital of Austria?|Vienna
What is the capital of Poland?|Warsaw
What is the capital of Sweden?|Stockholm
What is the capital of Norway?|Oslo
What is the capital of Denmark?|Copenhagen
What is the capital of Finland?|Helsinki
What is the capital of Ireland?|Dublin
What is the capital of Canada?|Ottawa
What is the capital of Australia?|Canberra
What is the capital of Cuba?|Havana
What is the capital of Peru?|Lima
What is the capital of Kenya?|Nairobi
What is the capital of Thailand?|Bangkok
What is the capital of Hungary?|Budapest
What is the capital of the United Kingdom?|London
What is the opposite of hot?|cold
What is the opposite of big?|small
What is the opposite of up?|down
What is the opposite of left?|right
What is the opposite of day?|night
What is the opposite of black?|white
What is the opposite of happy?|sad
What is the opposite of fast?|slow
What is the opposite of rich?|poor
What is the opposite of old?|young
What is the opposite of wet?|dry
What is the opposite of early?|late
What is the opposite of love?|hate
What is the opposite of strong?|weak
What is the opposite of true?|false
What is the opposite of north?|south
What is the opposite of east?|west
What is the opposite of buy?|sell
What is the opposite of win?|lose
What is the opposite of empty?|full
What is two plus two?|four
What is three plus four?|seven
What is five plus five?|ten
What is ten minus three?|seven
What is nine minus five?|four
What is two times three?|six
What is four times two?|eight
What is three times three?|nine
What is ten divided by two?|five
What is twelve divided by four?|three
What is one plus eight?|nine
What is six minus six?|zero
What is half of four?|two
What is double of five?|ten
What number comes after six?|seven
What number comes before ten?|nine
What colour is the sky on a clear day?|blue
What colour is grass?|green
What colour is blood?|red
What colour is snow?|white
What colour is coal?|black
What colour is a ripe lemon?|yellow
What colour do you get by mixing red and yellow?|orange
What colour do you get by mixing blue and yellow?|green
What colour do you get by mixing red and blue?|purple
What colour do you get by mixing black and white?|grey
What animal says meow?|cat
What animal barks?|dog
What animal gives us wool?|sheep
What animal makes honey?|bee
What animal has a long trunk?|elephant
What animal has a very long neck?|giraffe
What animal is known as the king of beasts?|lion
What animal hops and carries its young in a pouch?|kangaroo
What animal spins a web?|spider
What animal does beef come from?|cow
What animal does pork come from?|pig
What is a young dog called?|puppy
What is a young cat called?|kitten
What is a young cow called?|calf
What is a young sheep called?|lamb
What is the largest animal in the ocean?|blue whale
How many legs does a spider have?|eight
How many legs does an insect have?|six
How many days are in a week?|seven
How many months are in a year?|twelve
How many hours are in a day?|24
How many minutes are in an hour?|60
How many seconds are in a minute?|60
How many centimetres are in a metre?|100
How many metres are in a kilometre?|1000
How many grams are in a kilogram?|1000
How many sides does a triangle have?|three
How many sides does a square have?|four
How many wheels does a bicycle have?|two
How many fingers are on one hand?|five
How many letters are in the English alphabet?|26
How many years are in a century?|100
How many years are in a decade?|ten
How many players are in a football team on the field?|eleven
What is the chemical symbol for oxygen?|O
What is the chemical symbol for hydrogen?|H
What is the chemical symbol for carbon?|C
What is the chemical symbol for nitrogen?|N
What is the chemical symbol for gold?|Au
What is the chemical symbol for silver?|Ag
What is the chemical symbol for iron?|Fe
What is the chemical symbol for copper?|Cu
What is the chemical symbol for sodium?|Na
What is the chemical symbol for potassium?|K
What is the chemical symbol for helium?|He
What is the chemical symbol for lead?|Pb
What is the chemical formula of water?|H2O
What is the chemical formula of carbon dioxide?|CO2
What gas do humans need to breathe?|oxygen
What do we call frozen water?|ice
What do we call water in the form of gas?|steam
What is the unit of force?|newton
What is the unit of power?|watt
What is the unit of electric current?|ampere
What is the unit of electrical resistance?|ohm
What is the unit of frequency?|hertz
What is the unit of energy?|joule
What is the unit of pressure?|pascal
What planet do we live on?|Earth
What planet is closest to the sun?|Mercury
What is the largest planet in the solar system?|Jupiter
What planet is called the red planet?|Mars
What star is at the centre of the solar system?|the sun
What is the natural satellite of the Earth called?|the moon
What is the largest ocean?|the Pacific Ocean
What is the longest river in Africa?|the Nile
What is the highest mountain in the world?|Mount Everest
On what continent is Brazil?|South America
On what continent is India?|Asia
On what continent is Nigeria?|Africa
What language is spoken in Brazil?|Portuguese
What language is spoken in Mexico?|Spanish
What language is spoken in Austria?|German
What is the currency of Japan?|yen
What is the currency of the United States?|dollar
Who wrote Romeo and Juliet?|William Shakespeare
Who painted the Mona Lisa?|Leonardo da Vinci
What organ pumps blood through the body?|heart
What sense do we use our ears for?|hearing
What is the first month of the year?|January
What is the last month of the year?|December
What day comes after Monday?|Tuesday
What season comes after winter?|spring
What is the past tense of go?|went
What is the plural of child?|children
What is the plural of mouse?|mice
What is the first letter of the alphabet?|A
"""
