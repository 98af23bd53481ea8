"""The frame of every report and the page of the sweep report, as Jinja templates.

Rendered with autoescape on, so that only what is marked `safe` is markup.

The content security policy makes the browser itself refuse anything from the network. A string in a module instead of a data file:
a wheel built without package-data settings still carries it.
"""

TOP = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
"""

STYLE = """:root { --ink: #1f2328; --muted: #5b6470; --line: #d5d9e0; --soft: #f6f7f9; --ok: #00684a; --warn: #8a5300; --bad: #a3001e; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: white;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 28px 60px; }
h1 { font-size: 16px; font-weight: 600; color: var(--muted); margin: 0 0 14px; }
h2 { font-size: 19px; margin: 38px 0 6px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 4px 0; max-width: 108ch; }
.note { color: var(--muted); font-size: 13.5px; }
.headline { border-left: 5px solid var(--line); background: var(--soft); padding: 14px 20px; }
.headline h2 { margin: 0 0 6px; font-size: 24px; line-height: 1.25; }
.headline.ok { border-color: var(--ok); } .ok h2, td.ok, b.ok { color: var(--ok); }
.headline.warn { border-color: var(--warn); } .warn h2, td.warn, b.warn { color: var(--warn); }
.headline.bad { border-color: var(--bad); } .bad h2, td.bad, b.bad { color: var(--bad); }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 9px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid var(--line); vertical-align: bottom; }
th.num, td.num { text-align: right; white-space: nowrap; }
td.state { white-space: nowrap; }
td small, th small { color: var(--muted); font-weight: 400; }
tr.chosen td { background: #eaf4ef; }
table.wide { width: 100%; }
table.wide td, table.wide th { padding: 3px 6px; }
tr.explained td { border-bottom: 0; }
table.wide td.text { overflow-wrap: anywhere; color: var(--muted); padding-bottom: 6px; }
td.id { overflow-wrap: anywhere; min-width: 13ch; }
td.key { color: var(--muted); white-space: nowrap; }
code { font: 12.5px/1.45 ui-monospace, "Liberation Mono", Menlo, monospace; overflow-wrap: anywhere; }
.plot { margin: 8px 0; width: 100%; }
@page { size: A4 landscape; margin: 10mm; }
@media print {
  main { padding: 0; max-width: none; }
  body { zoom: .82; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  section, .plot, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  thead { display: table-header-group; }
}
"""

HEAD = """</style>
<script>{{ plotly_js | safe }}</script>
</head>
<body>
<main>
<h1>{{ title }}</h1>
"""

FOOT = """<h2>Provenance</h2>
<table><tbody>
{% for name, value in provenance %}<tr><td class="key">{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}</tbody></table>
</main>
</body>
</html>
"""


def page(body: str, style: str = "") -> str:
    """The template of a whole page: title, `plotly_js` and `provenance` around `body`, with `style` behind the shared one."""
    return TOP + STYLE + style + HEAD + body + FOOT


PAGE = page("""<section class="headline {{ headline.level }}">
<h2>{{ headline.title }}</h2>
{% for sentence in headline.sentences %}<p>{{ sentence }}</p>
{% endfor %}</section>

<h2>All trials ({{ trials | length }})</h2>
<p class="note">Accuracies ± half the width of the Wilson 95 % interval. ΔR: change of the held-out benchmark's cross-entropy against the
base, nats per answer token ± 1 paired standard error; positive: the base lost. 1 − Ω and Δρ: drift of the features in shape and in
scale on the benchmark. – : not measured. {{ sizes }}</p>
<table class="wide">
<thead><tr>
<th>trial</th><th>state</th><th>format</th><th class="num">lambda</th><th>penalty</th><th class="num">rank</th>
<th class="num">learning<br>rate</th><th class="num">steps</th><th class="num">train<br>time</th><th class="num">tokens<br>/s</th>
<th class="num">validation<br>accuracy</th><th class="num">valid.<br>loss</th>
<th class="num">test<br>accuracy</th><th class="num">ΔR, nats</th><th class="num">1 − Ω</th><th class="num">Δρ</th></tr></thead>
{% for t in trials %}<tbody><tr class="{{ 'chosen ' if t.chosen }}{{ 'explained' if t.reason }}">
<td class="id">{% if t.chosen %}<b>{{ t.trial_id }}</b>{% else %}{{ t.trial_id }}{% endif %}</td>
<td class="state {{ 'ok' if t.good else 'bad' }}">{{ t.state }}</td><td>{{ t.format }}</td>
<td class="num">{{ t.lambda_ }}</td><td>{{ t.penalty }}</td><td class="num">{{ t.rank }}</td>
<td class="num">{{ t.learning_rate }}</td><td class="num">{{ t.steps }}</td><td class="num">{{ t.time }}</td>
<td class="num">{{ t.speed }}</td>
<td class="num">{{ t.validation }}{% if t.validation_n %}<br><small>n = {{ t.validation_n }}</small>{% endif %}</td>
<td class="num">{{ t.validation_loss }}</td>
<td class="num">{{ t.test }}{% if t.test_n %}<br><small>n = {{ t.test_n }}</small>{% endif %}</td>
<td class="num">{{ t.delta }}{% if t.delta_n %}<br><small>n = {{ t.delta_n }}</small>{% endif %}</td>
<td class="num">{{ t.drift }}</td><td class="num">{{ t.delta_rho }}</td></tr>
{% if t.reason %}<tr><td></td><td class="text" colspan="15">{{ t.reason }}</td></tr>
{% endif %}</tbody>
{% endfor %}</table>

<section>
<h2>{{ task_words | capitalize }} by lambda and rank</h2>
<p class="note">Where a cell has several trials (learning rates), the one with the best validation accuracy. ± is half the width of the
Wilson 95 % interval; {{ sizes_task }}. A grey cell has no good trial, and says what happened instead.</p>
<div class="plot">{{ heat_map | safe }}</div>
</section>

<section>
<h2>Task gain against what the base lost</h2>
<p class="note">Up is better at the task; left is kinder to the base. Vertical bars: Wilson 95 % interval; horizontal bars: ± 1 paired
standard error over the same benchmark examples. {{ sizes }} The front is drawn on the signed loss: a benchmark that became better is no
loss. A format's loss is against its own quantized base, so compare losses within a panel.</p>
<div class="plot">{{ pareto_plot | safe }}</div>
</section>
{% if front %}<h3>On the front ({{ front | length }})</h3>
<table><thead><tr><th>format</th><th>trial</th><th class="num">lambda</th><th>penalty</th><th class="num">rank</th>
<th class="num">learning rate</th><th class="num">test accuracy</th><th class="num">n</th><th class="num">ΔR, nats per answer token</th>
<th class="num">n, tokens</th></tr></thead>
<tbody>{% for t in front %}<tr{% if t.chosen %} class="chosen"{% endif %}><td>{{ t.format }}</td><td class="id">{{ t.trial_id }}</td>
<td class="num">{{ t.lambda_ }}</td><td>{{ t.penalty }}</td><td class="num">{{ t.rank }}</td><td class="num">{{ t.learning_rate }}</td>
<td class="num">{{ t.test }}</td><td class="num">{{ t.all_test_n }}</td><td class="num">{{ t.delta }}</td>
<td class="num">{{ t.benchmark_tokens }}</td></tr>
{% endfor %}</tbody></table>{% endif %}

<section>
<h2>Learning curves</h2>
<p class="note">One line a trial; point at it for the trial's name and settings, click a lambda in the legend to hide it. Thick: the chosen
trial. Thin, ending in a cross: a trial that did not end good.</p>
{% if curves %}<div class="plot">{{ curves | safe }}</div>{% else %}<p>No step was logged.</p>{% endif %}
</section>

<section>
<h2>The merged checkpoint</h2>
{% if merge %}<table><tbody>
{% for row in merge %}<tr><td class="key">{{ row.name }}</td><td>{{ row.value }}</td>
<td class="{{ row.level }}">{{ row.judgement }}</td></tr>
{% endfor %}</tbody></table>{% else %}<p>No adapter was merged.</p>{% endif %}
</section>

<h2>Is regularizing worth it here?</h2>
<p class="note">The gating reading of the PRISM paper, App. H, from the lambda = 0 trials alone. Indicated when (i) the shape drift
1 − Ω is more than {{ factor }} times its measured null (the base against itself at another batch shape) and at least {{ headroom }}, below
which the paper saw nothing to repair; and (ii) the forgetting is shape-dominated: shape term above scale term, and |ΔR| above 2
standard errors with ΔR positive. The effects below the verdict are measured in this sweep and do not enter it.</p>
{% for g in gating %}<section>
<h3>{{ g.format }}: <b class="{{ g.level }}">{{ g.lead }}</b></h3>
<p>{{ g.why }}.</p>
<table><thead><tr><th>condition</th><th class="num">reading</th><th class="num">against</th><th>holds</th><th>n</th></tr></thead><tbody>
{% for c in g.conditions %}<tr><td>{{ c.name }}</td><td class="num">{{ c.reading }}</td><td class="num">{{ c.against }}</td>
<td class="{{ c.level }}">{{ c.holds }}</td><td>{{ c.n }}</td></tr>
{% endfor %}</tbody></table>
{% if g.effects %}<table><thead><tr><th>penalty</th><th class="num">lambda</th><th class="num">mean |ΔR| ± SE</th>
<th class="num">change against lambda = 0</th><th class="num">relative</th><th class="num">mean 1 − Ω</th><th>above 2 SE</th><th>n</th></tr></thead>
<tbody>{% for e in g.effects %}<tr><td>{{ e.penalty }}</td><td class="num">{{ e.lambda_ }}</td><td class="num">{{ e.mean }}</td>
<td class="num">{{ e.change }}</td><td class="num">{{ e.relative }}</td><td class="num">{{ e.drift }}</td>
<td class="{{ e.level }}">{{ e.above }}</td><td>{{ e.n }}</td></tr>
{% endfor %}</tbody></table>{% else %}<p class="note">No good trial with lambda &gt; 0 to measure the effect on.</p>{% endif %}
</section>
{% endfor %}

""")
