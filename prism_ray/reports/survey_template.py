"""The page of the survey report, as a Jinja template in the frame of `template.py`; rendered with autoescape on."""

from prism_ray.reports.template import page

STYLE = """details > summary { cursor: pointer; font-weight: 600; padding: 2px 0; }
td.name { overflow-wrap: anywhere; min-width: 16ch; }
table.wide td.note { color: var(--muted); max-width: 30ch; }
@media print {
  /* A printed page has nothing to click on. */
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""

PAGE = page(
    """{% macro fold(words, count) %}{% if count > fold_above %}<details><summary>{{ words }} ({{ count }})</summary>{{ caller() }}</details>\
{% else %}{{ caller() }}{% endif %}{% endmacro %}
<section class="headline {{ headline.level }}">
<h2>{{ headline.title }}</h2>
{% for sentence in headline.sentences %}<p>{{ sentence }}</p>
{% endfor %}</section>

<h2>Findings ({{ findings | length }})</h2>
{% if findings %}{% call fold("Findings", findings | length) %}<table class="wide"><thead><tr><th>kind</th><th>name</th><th>action</th><th>why</th></tr></thead><tbody>
{% for f in findings %}<tr><td>{{ f.kind }}{% if f.scheme %}<br><small>{{ f.scheme }}</small>{% endif %}</td><td class="name">{{ f.name }}</td>
<td><b>{{ f.action }}</b></td><td>{{ f.reason }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}{% else %}<p>None: no input is met more than once, none has fewer rows than columns.</p>{% endif %}

<h2>Rank by step</h2>
<p class="note">Rank: eigenvalues of the inputs' second moment above {{ threshold }} of the largest. n rows give a rank of at most n.
{% if looped %}Lines: inputs that are met more than once a forward pass, at most {{ lines }}, the largest gains first; the last point, a diamond, is the rank of the
sum over all steps.{% else %}Bars: rank in front of the most that n rows of this width can have.{% endif %}</p>
<div class="plot">{{ steps | safe }}</div>

<h3>All inputs ({{ layers | length }})</h3>
<p class="note">One row an input; weights that get the very same input share it. tokens: rows of one step. n: rows of step 0 that were read. gain: rank over all steps / rank
of step 0. Overlap: mean squared cosine of the principal angles between the spans above the threshold, of step 0 and the last step; by halves: of step 0, and of the last
step, each between two halves of the samples, which is the noise floor. chance: two random spans of these dimensions. – : not defined, as for an input that is met once.</p>
{% call fold("All inputs", layers | length) %}<table class="wide"><thead><tr><th>input</th><th class="num">columns</th><th class="num">steps</th>
<th class="num">tokens</th><th class="num">n</th><th class="num">rank<br>step 0</th><th class="num">rank<br>last step</th><th class="num">rank<br>all steps</th>
<th class="num">effective<br>rank</th><th class="num">gain</th><th class="num">overlap<br>first, last</th><th class="num">by halves<br>first, last</th>
<th>shifted</th><th class="num">tr(H)</th><th>note</th></tr></thead><tbody>
{% for l in layers %}<tr><td class="name">{{ l.name }}<br><small>{{ l.component }}{% if l.component %}: {% endif %}{{ l.members }}</small></td><td class="num">{{ l.width }}</td>
<td class="num">{{ l.calls }}</td><td class="num">{{ l.tokens }}</td><td class="num">{{ l.n }}</td><td class="num">{{ l.first }}</td><td class="num">{{ l.last }}</td>
<td class="num">{{ l.rank }}</td><td class="num">{{ l.effective }}</td><td class="num{{ ' warn' if l.blind }}">{{ l.gain }}</td>
<td class="num">{{ l.overlap }}{% if l.chance %}<br><small>{{ l.chance }}</small>{% endif %}</td><td class="num">{{ l.floors[0] }}{% if l.floors | length > 1 %}<br>{{ l.floors[1] }}{% endif %}</td>
<td class="{{ 'warn' if l.shifted == 'yes' }}">{{ l.shifted }}</td><td class="num">{{ l.trace }}</td><td class="note">{{ l.note }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}

{% if experts_total %}<h2>Tokens by expert ({{ experts_total }} weights)</h2>
<p class="note">Dashed line: as many tokens as columns. Left of it an expert is starved: its Hessian has no full rank, whatever the data.</p>
<div class="plot">{{ tokens | safe }}</div>
<h3>Experts, the fewest tokens for their width first{% if experts | length < experts_total %} ({{ experts | length }} of {{ experts_total }}; survey.parquet has all){% endif %}</h3>
{% call fold("Experts", experts | length) %}<table class="wide"><thead><tr><th>projection</th><th class="num">expert</th><th class="num">columns</th><th class="num">tokens</th>
<th class="num">share of rows</th><th class="num">rank at most</th><th class="num">rank</th><th class="num">n</th><th>state</th><th>note</th></tr></thead><tbody>
{% for e in experts %}<tr><td class="name">{{ e.name }}</td><td class="num">{{ e.expert }}</td><td class="num">{{ e.width }}</td><td class="num">{{ e.tokens }}</td>
<td class="num">{{ e.share }}</td><td class="num">{{ e.bound }}</td><td class="num">{{ e.rank }}</td><td class="num">{{ e.n }}</td>
<td class="{{ e.level }}">{{ e.state }}</td><td class="note">{{ e.note }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}{% endif %}

<h2>Feedback exposure</h2>
{% if schemes %}<p class="note">Read on {{ exposure_samples }} samples, each component quantized alone. Intervals: Wilson's at 95 % over tokens as if independent. λ = 1 is
the quantized rollout; λ = 0 feeds back the clean state, so that each step has its own error alone.</p>
<div class="plot">{{ injection | safe }}</div>
{% for s in schemes %}<h3>{{ s.name }}: {{ s.detail }} (n = {{ s.n }} tokens)</h3>
<p>{{ s.text }}</p>
<table><thead><tr><th>component</th><th class="num">top tokens kept</th><th>advice</th></tr></thead><tbody>
{% for c in s.components %}<tr><td>{{ c.name }}</td><td class="num">{{ c.agreement }}</td><td>{{ c.action }}</td></tr>
{% endfor %}<tr><td>adapter, rotated</td><td class="num">{{ s.rotated }}</td><td></td></tr></tbody></table>
<p>Local spectral radius: base {{ s.radius[0] }}, loop quantized {{ s.radius[1] }}.</p>
<table><thead><tr><th>error of the same norm</th><th class="num">adapter: top tokens kept</th><th class="num">core: top tokens kept</th></tr></thead><tbody>
{% for k in s.kinds %}<tr><td>{{ k.name }}</td><td class="num">{{ k.cells[0] }}</td><td class="num">{{ k.cells[1] }}</td></tr>
{% endfor %}</tbody></table>
<p class="note">Three readings of sensitivity side by side; only ablation sees where an error enters the loop, the other two mislead. Proxy: tr(D H D') of the rounding error D,
summed over steps, in itself and of tr(W H W'); spread: its largest over its smallest step; first: step 0's part, 1 / {{ s.steps }} where all steps are alike.</p>
{% call fold("Projections", s.sensitivities | length) %}<table class="wide"><thead><tr><th>projection</th><th>component</th><th class="num">ablation:<br>top tokens changed</th>
<th class="num">random-direction<br>gain</th><th class="num">Hessian<br>trace</th><th class="num">proxy</th><th class="num">proxy,<br>relative</th><th class="num">spread<br>of steps</th>
<th class="num">first</th></tr></thead><tbody>
{% for r in s.sensitivities %}<tr><td class="name">{{ r.name }}</td><td>{{ r.component }}</td><td class="num">{{ r.ablation }}</td><td class="num">{{ r.gain }}</td>
<td class="num">{{ r.trace }}</td><td class="num">{{ r.proxy }}</td><td class="num">{{ r.relative }}</td><td class="num">{{ r.spread }}</td><td class="num">{{ r.first }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}
{% endfor %}{% else %}<p>Not measured: {{ no_exposure }}.</p>{% endif %}

{% if left_out %}<h2>Not surveyed ({{ left_out | length }})</h2>
{% call fold("Weights", left_out | length) %}<table><thead><tr><th>weight</th><th>why</th><th class="num">bytes</th></tr></thead><tbody>
{% for name, reason, size in left_out %}<tr><td class="name">{{ name }}</td><td>{{ reason }}</td><td class="num">{{ size }}</td></tr>
{% endfor %}</tbody></table>{% endcall %}{% endif %}
""",
    STYLE,
)
