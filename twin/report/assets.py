"""The page's looks and behaviour: one style sheet, one script."""

from twin.report.colours import DARK, LIGHT, declared

CSS = (
    f"""
:root {{ color-scheme: light dark; {declared(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {declared(DARK)} }} }}
"""
    + """* { box-sizing: border-box; }
body {
  margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1240px; margin: 0 auto; padding: 26px 24px 40px; }
.eyebrow { color: var(--muted); font-size: 12.5px; letter-spacing: .08em;
  text-transform: uppercase; }
h1 { font-size: 27px; line-height: 1.25; margin: 2px 0 6px; font-weight: 650; }
h2 { font-size: 19px; margin: 38px 0 4px; font-weight: 650; }
h3 { font-size: 14px; margin: 0 0 2px; font-weight: 600; }
p { margin: 0 0 10px; max-width: 115ch; }
.verdict { font-size: 16.5px; }
.caption { color: var(--muted); font-size: 14px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; min-width: 0; }
.grid { display: grid; gap: 12px; }
.two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.cards { grid-template-columns: repeat(3, minmax(0, 1fr)); margin-top: 16px; }
@media (max-width: 860px) { .two, .three, .cards { grid-template-columns: minmax(0, 1fr); } }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 16px 0 0;
  font-size: 14px; }
.facts dt { color: var(--muted); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.badge { display: inline-block; border-radius: 4px; padding: 0 7px; font-size: 12.5px;
  font-weight: 600; margin-right: 4px; }
.badge.fitted { background: var(--ok-bg); color: var(--ok); }
.badge.unsure { background: var(--warn-bg); color: var(--warn); }
.warning { background: var(--warn-bg); color: var(--warn); border-radius: 6px; padding: 8px 12px;
  margin-top: 12px; max-width: none; }
.legend { position: sticky; top: 0; z-index: 5; background: var(--bg); padding: 9px 0;
  margin-top: 12px; border-bottom: 1px solid var(--line); display: flex; flex-wrap: wrap;
  gap: 4px 20px; font-size: 14px; align-items: center; }
.swatch { display: inline-block; width: 13px; height: 13px; border-radius: 3px; margin-right: 7px;
  vertical-align: -1.5px; background: var(--colour); }
.kpi .name { color: var(--muted); font-size: 13.5px; }
.kpi .what { color: var(--muted); font-size: 12.5px; margin-top: 4px; }
.kpi .line { display: flex; justify-content: space-between; align-items: baseline; gap: 10px; }
.kpi .figure { font-size: 21px; font-variant-numeric: tabular-nums; color: var(--muted);
  white-space: nowrap; }
.kpi .figure.best { color: var(--ink); font-weight: 650; }
.kpi .figure.only { color: var(--ink); }
.range { display: block; color: var(--muted); font-size: 12px; font-weight: 400;
  text-align: right; white-space: nowrap; }
.row { margin: 14px 0 6px; font-weight: 600; }
.row span { color: var(--muted); font-weight: 400; }
.keys { display: flex; flex-wrap: wrap; gap: 3px 16px; font-size: 13.5px; margin: 4px 0 8px; }
button.view { font: inherit; font-size: 13.5px; color: var(--ink); background: var(--card);
  border: 1px solid var(--line); padding: 3px 11px; cursor: pointer; }
button.view:first-child { border-radius: 6px 0 0 6px; }
button.view:last-child { border-radius: 0 6px 6px 0; border-left: 0; }
button.view[aria-pressed=true] { background: var(--accent); color: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid var(--grid);
  vertical-align: baseline; }
th { font-weight: 600; color: var(--muted); }
th.of { text-align: center; }
th.l, td.l { text-align: left; }
td:not(.l) { white-space: nowrap; }
td.best { font-weight: 700; }
td.sub { padding-left: 24px; color: var(--muted); }
td .note { color: var(--muted); font-size: 12.5px; }
tr.first td { border-top: 1px solid var(--line); }
.scroll { overflow-x: auto; }
footer { margin-top: 40px; border-top: 1px solid var(--line); padding-top: 14px;
  font-size: 14px; }
footer li { margin-bottom: 5px; max-width: 115ch; }
"""
)

JS = """
(function () {
  const data = JSON.parse(document.getElementById('charts').textContent);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const coloured = value => {
    if (typeof value === 'string') return value.startsWith('--') ? css(value) : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === 'object') {
      const out = {};
      for (const key in value) out[key] = coloured(value[key]);
      return out;
    }
    return value;
  };
  const axis = extra => {
    const title = Object.assign({standoff: 6, font: {size: 12}}, extra && extra.title);
    return Object.assign({gridcolor: '--grid', linecolor: '--line', zerolinecolor: '--line',
      tickcolor: '--line', dividercolor: '--line', automargin: true,
      tickfont: {size: 11}}, extra, {title: title});
  };
  let tail = false;
  const tailTraces = traces => traces.map(trace => {
    if (trace.role === 'limit') return Object.assign({}, trace, {y: [1e-9, 1]});
    const x = [], y = [];
    trace.y.forEach((share, i) => { if (share < 1) { x.push(trace.x[i]); y.push(1 - share); } });
    return Object.assign({}, trace, {x: x, y: y,
      hovertemplate: trace.name + ': %{y:.2%} slower than %{x:.3s}s<extra></extra>'});
  });
  const drawn = chart => {
    const layout = Object.assign({}, chart.layout);
    let traces = chart.traces;
    if (chart.kind === 'cdf' && tail) {
      traces = tailTraces(traces);
      layout.yaxis = {type: 'log', range: [-4, 0.03], tickvals: [1e-4, 1e-3, 1e-2, 0.1, 1],
        ticktext: ['.01 %', '.1 %', '1 %', '10 %', '100 %'],
        title: {text: 'requests slower (log)'}};
    }
    layout.xaxis = axis(layout.xaxis);
    layout.yaxis = axis(layout.yaxis);
    const dress = Object.assign({
      height: chart.height, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: '--ink'},
      hoverlabel: {bgcolor: '--card', bordercolor: '--line', font: {color: '--ink'}},
      showlegend: false, hovermode: 'closest', dragmode: 'zoom',
    }, layout, {margin: Object.assign({l: 56, r: 14, t: 10, b: 44}, layout.margin)});
    return [coloured(traces), coloured(dress)];
  };
  const config = {responsive: true, displaylogo: false, displayModeBar: false,
    doubleClick: 'reset'};
  const draw = only => {
    for (const id in data) {
      if (only && data[id].kind !== only) continue;
      const [traces, layout] = drawn(data[id]);
      Plotly.react(document.getElementById(id), traces, layout, config);
    }
  };
  for (const button of document.querySelectorAll('button.view')) {
    button.addEventListener('click', () => {
      tail = button.dataset.view === 'tail';
      for (const other of document.querySelectorAll('button.view'))
        other.setAttribute('aria-pressed', String(other === button));
      draw('cdf');
    });
  }
  draw();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw());
})();
"""
