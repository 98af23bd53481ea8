"""The page of the drift report, as a Jinja template in the frame of `template.py`; rendered with autoescape on."""

from prism_ray.reports.template import page

STYLE = """.headline ul { margin: 6px 0; padding-left: 20px; }
.headline li { max-width: 108ch; }
details { margin: 6px 0; }
details > summary { cursor: pointer; font-weight: 600; padding: 2px 0; overflow-wrap: anywhere; }
summary small { font-weight: 400; color: var(--muted); font-size: 13px; }
details.verdict { border-left: 3px solid var(--line); padding-left: 12px; }
details.verdict p { overflow-wrap: anywhere; }
table.long thead th { position: sticky; top: 0; background: white; z-index: 1; }
td.name { overflow-wrap: anywhere; min-width: 11ch; max-width: 26ch; }
tbody.group tr:last-child td { border-bottom: 1px solid #9aa3b0; }
th.reading { min-width: 15ch; }
.whole { white-space: nowrap; }
th.group { text-align: center; border-left: 1px solid var(--line); }
td.first, th.first { border-left: 1px solid var(--line); }
small.bad { color: var(--bad); } small.ok { color: var(--ok); } small.warn { color: var(--warn); }
@media print {
  /* A printed page has nothing to click on. */
  details::details-content { content-visibility: visible; block-size: auto; }
  table.long thead th { position: static; }
}
"""

PAGE = page(
    """{% set gap %}<span class="whole">|ΔR|</span>{% endset %}
{% macro names(r, benchmark=true) %}<td class="name">{{ r.variant }}</td>\
{% if benchmark %}<td class="name">{{ r.benchmark }}</td>{% endif %}{% endmacro %}
{% macro two(value, under, level="") %}<td class="num">{{ value }}{% if under %}<br>\
<small class="{{ level }}">{{ under }}</small>{% endif %}</td>{% endmacro %}
{% macro fold(words, count, above=fold_above) %}{% if count > above %}
<details><summary>{{ words }} ({{ count }})</summary>{{ caller() }}</details>\
{% else %}{{ caller() }}{% endif %}{% endmacro %}
<section class="headline {{ headline.level }}">
<h2>{{ headline.title }}</h2>
{% if headline.failures %}<ul>{% for line in headline.failures[:8] %}<li>{{ line }}</li>{% endfor %}</ul>
{% if headline.failures | length > 8 %}<details><summary>{{ headline.failures | length - 8 }} more</summary>
<ul>{% for line in headline.failures[8:] %}<li>{{ line }}</li>{% endfor %}</ul></details>{% endif %}{% endif %}
{% for sentence in headline.sentences %}<p>{{ sentence }}</p>
{% endfor %}</section>

<h2>What to do, variant by variant</h2>
<p class="note">Worst first: what drifted before what is within the noise, then by the bound B. B = δ + γ bounds the change of the mean
cross-entropy {{ gap }}, in nats a scored token: scale and shape of the features make δ, the output head γ. An axis has drifted when it
clears the base's own reading over other batch layouts.</p>
{% for v in verdicts %}<details class="verdict"{{ " open" if v.open }}><summary>{{ v.variant }}: \
<b class="{{ v.level }}">{{ v.status }}</b>\
{% if v.fails %} <b class="bad">fails</b>{% endif %} <small>{{ v.words }}</small></summary>
{% for text in v.texts %}<p>{{ text }}</p>
{% endfor %}</details>
{% endfor %}

<h2>All readings ({{ rows | length }})</h2>
<p class="note">ρ_T, ρ_P: size of the base's and the variant's features; 1 − Ω: how far their arrangement differs, by channel: with every
channel at the same weight. K_feat = {{ k_feat }}. B: with its 95 % bootstrap interval over samples{{ replicates }}. ΔR = R_P − R_T in
nats a token ± 1 paired standard error over samples; positive: the variant is worse. Beyond 2 standard errors (SE) about one reading in
twenty lies by chance. – : not measured.</p>
{% call fold("All readings", rows | length, fold_readings_above) %}<table class="wide{{ ' long' if rows | length > fold_above }}">
<thead><tr><th>variant</th><th>benchmark</th><th class="num">n samples<br><small>tokens</small></th><th class="num">ρ_T</th>
<th class="num">ρ_P</th><th class="num">1 − Ω</th><th class="num">1 − Ω by<br>channel</th><th class="num">δ</th><th class="num">γ</th>
<th class="num">B, nats<br><small>95 % interval</small></th><th class="num">{{ gap }} ± SE<br><small>signed</small></th>
<th class="num">dominant<br>axis</th><th>status</th></tr></thead>
{% for group in rows | groupby("order") %}<tbody class="group">{% for r in group.list %}<tr>{{ names(r) }}
{{ two(r.samples, r.tokens) }}<td class="num">{{ r.rho_target }}</td><td class="num">{{ r.rho_proxy }}</td>
<td class="num">{{ r.drift }}</td><td class="num">{{ r.channel }}</td><td class="num">{{ r.delta }}</td><td class="num">{{ r.gamma }}</td>
{{ two(r.bound, r.interval) }}{{ two(r.gap, r.gap_note, r.gap_level) }}{{ two(r.axis, r.share) }}
<td class="{{ r.level }}">{{ r.status }}{% if r.fails %}<br><small class="bad">fails</small>{% endif %}</td></tr>
{% endfor %}</tbody>
{% endfor %}</table>{% endcall %}

<h3>Other alignments, by range, and by sequence</h3>
<p class="note">The same features after the orthogonal map that fits them best (nuclear) or that makes B smallest (joint). The maps are
fitted on these samples, so no interval is given. By range: the largest minus the smallest change of any logit, a sharper bound on |ΔR| without
axes: how much of B the change really points at. By sequence: the mean over samples of a sample's mean, at W = I.</p>
{% call fold("Other alignments", rows | length) %}<table class="wide{{ ' long' if rows | length > fold_above }}"><thead>
<tr><th colspan="2"></th>{% for a in alignments %}<th class="group" colspan="4">{{ a }}</th>{% endfor %}
<th class="group" colspan="3">by range</th><th class="group" colspan="2">by sequence</th><th></th></tr>
<tr><th>variant</th><th>benchmark</th>{% for a in alignments %}<th class="num first">1 − Ω</th><th class="num">δ</th><th class="num">γ</th>
<th class="num">B</th>{% endfor %}<th class="num first">features</th><th class="num">head</th><th class="num">sum</th><th class="num first">B</th>
<th class="num">ΔR</th><th class="num">n samples</th></tr></thead>
{% for group in rows | groupby("order") %}<tbody class="group">{% for r in group.list %}<tr>{{ names(r) }}
{% for a in r.aligned %}<td class="num first">{{ a.drift }}</td><td class="num">{{ a.delta }}</td><td class="num">{{ a.gamma }}</td>
<td class="num">{{ a.bound }}</td>{% endfor %}{% for value in r.range %}<td class="num{{ ' first' if loop.first }}">{{ value }}</td>{% endfor %}
<td class="num first">{{ r.bound_sequence }}</td><td class="num">{{ r.gap_sequence }}</td>
<td class="num">{{ r.samples }}</td></tr>
{% endfor %}</tbody>
{% endfor %}</table>{% endcall %}

<section>
<h2>Which axis drifted</h2>
<p class="note">Parts of B at W = I: scale and shape part δ as their squares do, the head is γ. Whisker: 95 % bootstrap interval of B over
samples. Point at a bar for its numbers; the buttons show shares instead.</p>
<div class="plot">{{ bars | safe }}</div>
</section>

<section>
<h2>The bound against the measured gap</h2>
<p class="note">{{ gap }} ± 1 SE against B (95 % interval), both logarithmic. Below the dashed line y = x is the safe zone in which the
bound holds; what counts is whether a larger B comes with a larger gap, not how close a point is to the line. Hollow: {{ gap }} below 2
SE, which is the noise of these samples. {{ scatter_words }}</p>
{% if above %}<p><b class="bad">Above the line, which the bound forbids:</b> {{ above | join("; ") }}. Take this as a fault of the
measurement and
report it.</p>{% endif %}
<div class="plot">{{ scatter | safe }}</div>
</section>

<h2>Axes beside their floors</h2>
<p class="note">Each axis in its own unit: scale |ρ_T − ρ_P|, shape 1 − Ω, head γ. Floor: the base against itself over other batch
layouts, mean ± standard deviation and the largest of them. Above: the reading exceeds the largest and the mean by more than two standard
deviations. What is not above is no zero: it is not distinguishable.</p>
{% call fold("Axes beside their floors", rows | length) %}<table class="wide{{ ' long' if rows | length > fold_above }}"><thead>
<tr><th colspan="2"></th>{% for axis in axes %}<th class="group" colspan="3">{{ axis }}</th>{% endfor %}<th></th></tr>
<tr><th>variant</th><th>benchmark</th>{% for axis in axes %}<th class="num first">value<br><small>share of B</small></th>
<th class="num">floor<br><small>largest</small></th><th>above</th>{% endfor %}<th class="num">layouts</th></tr></thead>
{% for group in rows | groupby("order") %}<tbody class="group">{% for r in group.list %}<tr>{{ names(r) }}
{% for a in r.floors %}<td class="num first">{{ a.value }}<br><small>{{ a.share }}</small></td>{{ two(a.floor, a.largest) }}
<td class="{{ a.level }}">{{ a.above }}</td>{% endfor %}<td class="num">{{ r.layouts }}</td></tr>
{% endfor %}</tbody>
{% endfor %}</table>{% endcall %}

<h2>Class directions</h2>
<p class="note">The direction between the means of the two most frequent answers, at the first scored token. Own null: cosine between the
directions of random halves of the variant's own rows, mean ± standard deviation over the splits; called below mean − 2 sd. The halves
hold half the rows, so that the null lies below the cosine of two runs without any rotation: what is called is more than sampling noise,
what is not called may still have moved. The closed form 1 / (1 + 4 / κ) decides nothing.</p>
{% if directions %}{% call fold("Class directions", directions | length) %}
<table class="wide{{ ' long' if directions | length > fold_above }}"><thead><tr><th>variant</th><th>benchmark</th><th>answers</th>
<th class="num">n a class</th><th class="num">splits</th><th class="num">cosine</th>
<th class="num">own null<br><small>call below</small></th>
<th class="num">base null</th><th class="num">closed form<br><small>κ</small></th><th>verdict</th></tr></thead>
{% for group in directions | groupby("order") %}<tbody class="group">{% for d in group.list %}<tr>{{ names(d) }}
<td class="name">{{ d.classes }}</td>
<td class="num">{{ d.n }}</td><td class="num">{{ d.splits }}</td><td class="num">{{ d.cosine }}</td>{{ two(d.own, d.below) }}
<td class="num">{{ d.base }}</td>{{ two(d.floor, d.kappa) }}<td class="{{ d.level }}">{{ d.verdict }}</td></tr>
{% endfor %}</tbody>
{% endfor %}</table>{% endcall %}{% endif %}
{% for sentence in no_direction %}<p>{{ sentence }}</p>
{% endfor %}
{% if transfers %}<h3>Does a probe of the base still work?</h3>
<p class="note">Fitted on half of the base's rows, read on the other half. Slope and shift of the variant's decision values on the base's,
± 1 standard error; AUROC and accuracy with 95 % intervals; recalibrated: with a new threshold only.</p>
{% call fold("Transfer of the base's probe", transfers | length) %}<table class="wide"><thead><tr><th>variant</th>
<th>benchmark</th><th class="num">n<br><small>fitted on</small></th><th class="num">slope</th><th class="num">shift</th>
<th class="num">R²</th>
<th class="num">AUROC<br>base</th><th class="num">AUROC<br>variant</th><th class="num">AUROC<br>change</th>
<th class="num">accuracy<br>base</th>
<th class="num">accuracy<br>transferred</th><th class="num">accuracy<br>recalibrated</th></tr></thead>
{% for t in transfers %}<tbody><tr class="explained">{{ names(t) }}{{ two(t.n, t.n_fit) }}<td class="num">{{ t.slope }}</td>
<td class="num">{{ t.shift }}</td><td class="num">{{ t.r2 }}</td>{% for e in t.estimates[:2] %}{{ two(*e) }}{% endfor %}
<td class="num">{{ t.change }}</td>{% for e in t.estimates[2:] %}{{ two(*e) }}{% endfor %}</tr>
<tr><td></td><td class="text" colspan="11"><b>{{ t.kind }}</b>: {{ t.remedy }}</td></tr></tbody>
{% endfor %}</table>{% endcall %}{% endif %}

<h2>Agreement with the base</h2>
<p class="note">Samples ranked by the cosine of the two output distributions, which needs no labels, and by the variant's own confidence.
Accuracy is the variant's share of right tokens in the part below and in the part above a percentile, and their difference ± its standard
error: a score is useful where the low part is worse by more than 2 of them. KL in nats a token.</p>
{% call fold("Agreement", agreements | length) %}<table class="wide{{ ' long' if agreements | length > fold_above }}"><thead>
<tr><th colspan="4"></th>{% for p in percentiles %}<th class="group" colspan="2">lowest {{ p }} %</th>{% endfor %}</tr>
<tr><th>variant</th><th>benchmark</th><th class="num">agreement<br><small>KL</small></th><th>ranked by</th>
{% for p in percentiles %}<th class="num first">accuracy low, high<br><small>n</small></th>
<th class="num">high − low</th>{% endfor %}</tr></thead>
{% for a in agreements %}<tbody class="group">{% for s in a.scores %}<tr>{% if loop.first %}{{ names(a) }}{{ two(a.agreement, a.kl) }}
{% else %}<td></td><td></td><td></td>{% endif %}<td>{{ s.score }}</td>{% for c in s.cells %}<td class="num first">{{ c.parts }}<br>\
<small>{{ c.n }}</small></td><td class="num {{ c.level }}">{{ c.separation }}</td>{% endfor %}</tr>
{% else %}<tr>{{ names(a) }}{{ two(a.agreement, a.kl) }}<td colspan="{{ 1 + 2 * percentiles | length }}">too few samples to split</td></tr>
{% endfor %}</tbody>
{% endfor %}</table>{% endcall %}

<h2>Does the reading rank the variants?</h2>
{% if ranking %}
<p class="note">Spearman correlation of each reading with {{ gap }} over the variants of a benchmark, with a 95 % interval and n; mean
over benchmarks ± its standard error. The rows add scale and head to the shape, as in the paper's Table 3. {{ gap }} has noise of its own,
which lowers every row alike.</p>
<table{% if ranking_benchmarks | length > 4 %} class="wide"{% endif %}><thead><tr><th class="reading">reading</th>
{% for name in ranking_benchmarks %}<th class="num name">{{ name }}</th>{% endfor %}
<th class="num">mean ± SE</th></tr></thead><tbody>
{% for r in ranking %}<tr><td>{{ r.what }}</td>{% for c in r.cells %}{{ two(*c) }}{% endfor %}<td class="num">{{ r.mean }}</td></tr>
{% endfor %}</tbody></table>{% else %}<p>{{ no_ranking }}</p>{% endif %}

<h2>Inputs on which a variant leaves the base most</h2>
<p class="note">The {{ most }} largest residuals of each variant over its benchmarks: |Z_T − Z_P| / √m over the m scored tokens of a
sample, in units of the features, and its scale and shape parts (squares add up). CE: mean cross-entropy of the sample, KL of the output
distributions, both in nats a token. Rank: by residual in the benchmark. One sample is one reading: it has no error bar.</p>
{% for v in worst_inputs %}<details{{ " open" if loop.first }}><summary>{{ v.variant }} <small>{{ v.words }}</small></summary>
{% if v.samples %}<table><thead><tr><th>sample</th><th>benchmark</th><th class="num">rank<br>there</th><th class="num">tokens</th>
<th class="num">residual</th>
<th class="num">scale</th><th class="num">shape</th><th class="num">CE base</th><th class="num">CE variant</th><th class="num">change</th>
<th class="num">agreement</th><th class="num">KL</th></tr></thead><tbody>
{% for s in v.samples %}<tr><td class="name">{{ s.sample }}</td><td class="name">{{ s.benchmark }}</td><td class="num">{{ s.rank }}</td>
<td class="num">{{ s.tokens }}</td><td class="num">{{ s.residual }}</td><td class="num">{{ s.scale }}</td><td class="num">{{ s.shape }}</td>
<td class="num">{{ s.ce_target }}</td><td class="num">{{ s.ce_proxy }}</td><td class="num">{{ s.change }}</td>
<td class="num">{{ s.agreement }}</td><td class="num">{{ s.kl }}</td></tr>
{% endfor %}</tbody></table>{% endif %}</details>
{% else %}<p>No sample was given.</p>
{% endfor %}

{% if flips %}<h2>Expert routing</h2>
<p class="note">Share of (token, layer) routings whose set of experts differs from the base's; floor: the base against itself over other
batch layouts. Tokens: scored ones.</p>
{% call fold("Expert routing", flips | length) %}<table><thead><tr><th>variant</th><th>benchmark</th><th class="num">flips</th>
<th class="num">floor</th><th class="num">n tokens</th></tr></thead><tbody>
{% for f in flips %}<tr>{{ names(f) }}<td class="num">{{ f.flips }}</td><td class="num">{{ f.floor }}</td>
<td class="num">{{ f.tokens }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}{% endif %}

<h2>Dropped and truncated samples</h2>
{% for sentence in truncated %}<p>{{ sentence }}</p>
{% endfor %}
{% if dropped %}<table><thead><tr><th>variant</th><th>benchmark</th><th class="num">dropped</th>
<th>samples (model with NaN or infinity)</th></tr>
</thead><tbody>{% for d in dropped %}<tr>{{ names(d) }}<td class="num">{{ d.count }}</td><td class="name">{{ d.words }}</td></tr>
{% endfor %}</tbody></table>{% else %}<p>No sample was dropped.</p>{% endif %}

""",
    STYLE,
)
