//! A plan as one page for a browser: nothing fetched, no script, light or dark as the reader's system is.

mod draw;

use super::Plan;
use super::groups::{Group, GroupBytes};
use super::report::{some_names, spread};
use crate::error::human_bytes;
use crate::table::Align;
use crate::work::MAX_THREADS;
use formats::config::{FfnConfig, IndexerRole};
use formats::gguf::GgufSet;
use formats::manifest::ExpertCut;
use formats::{Dtype, bytes_of};
use std::collections::BTreeMap;
use std::fmt::Write;

const STYLE: &str = include_str!("html/page.css");

/// What becomes of one type of the source: tensors count once, however many ranks have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Flow {
    tensors: usize,
    source_bytes: u64,
    stored_bytes: u64,
}

/// By type in the source and type in the checkpoint.
type Flows = BTreeMap<(Dtype, Dtype), Flow>;

impl Plan {
    /// The plan as an HTML page. `set` is what the plan was made from.
    pub fn html(&self, set: &GgufSet) -> String {
        let name = escape(&self.model.name);
        let mut page = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <title>{name} on {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
            count(self.options.ranks, "rank")
        );
        self.summary(&mut page, &name, set);
        self.memory_map(&mut page);
        self.types(&mut page);
        self.tensors(&mut page);
        self.left_out(&mut page);
        // Writing to a String cannot fail.
        let _ = writeln!(
            page,
            "<footer>Made by shardmill {} from the headers alone; no weight was read.</footer>\n</main>\n</body>\n</html>",
            env!("CARGO_PKG_VERSION")
        );
        page
    }

    fn summary(&self, page: &mut String, name: &str, set: &GgufSet) {
        let sizes = || self.layouts.iter().map(|layout| layout.bytes);
        let (least, most) = (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0));
        let memory = self.peak_memory();
        let parts = set.parts();
        let first = parts[0].path.file_name().unwrap_or_default().to_string_lossy();
        let more = match parts.len() {
            1 => String::new(),
            n => format!(" and {} more", count(n - 1, "part")),
        };
        let experts = match (&self.model.config.moe, self.options.experts) {
            (None, _) => "",
            (Some(_), ExpertCut::Tensor) => "every rank has a slice of every expert",
            (Some(_), ExpertCut::Expert) => "every rank has some experts whole",
        };
        let even = if least == most { "imbalance: an even cut" } else { "imbalance: largest over mean" };
        let _ = writeln!(
            page,
            "<header>\n<h1><bdi>{name}</bdi></h1>\n<p>What <code>shardmill convert</code> would make of <code>{}</code>{more}.</p>\n</header>",
            escape(&first)
        );
        page.push_str("<div class=\"tiles\">\n");
        tile(
            page,
            &self.options.ranks.to_string(),
            if self.options.ranks == 1 { "rank file" } else { "rank files, one for each GPU" },
        );
        tile(page, &human_bytes(most), if least == most { "on each rank" } else { "on the largest rank" });
        tile(page, &format!("{:.1} %", self.imbalance() * 100.0), even);
        tile(page, &human_bytes(self.source_bytes), &format!("source, {}", count(parts.len(), "file")));
        tile(page, &human_bytes(self.disk_bytes()), "disk needed");
        tile(page, &human_bytes(memory.most), &format!("memory at most, with {MAX_THREADS} threads"));
        page.push_str("</div>\n<h2>Model</h2>\n");
        let _ = writeln!(
            page,
            "<p>Architecture <code>{}</code>. {}</p>",
            self.model.architecture,
            sentence(experts)
        );
        page.push_str("<div class=\"card\"><dl>\n");
        for (term, value) in self.facts() {
            let _ = writeln!(page, "<div><dt>{term}</dt><dd>{}</dd></div>", escape(&value));
        }
        page.push_str("</dl></div>\n");
    }

    /// The architecture in numbers.
    fn facts(&self) -> Vec<(&'static str, String)> {
        let config = &self.model.config;
        let a = &config.attention;
        let dense = config.layers.iter().filter(|layer| matches!(layer.ffn, FfnConfig::Dense { .. })).count();
        let widths = |pick: fn(&FfnConfig) -> Option<usize>| {
            config.layers.iter().find_map(|layer| pick(&layer.ffn)).map(|n| n.to_string())
        };
        let mut facts = vec![
            ("layers", format!("{dense} dense + {} MoE", config.layers.len() - dense)),
            ("MTP layers", config.mtp_layers.len().to_string()),
            ("hidden size", config.hidden_size.to_string()),
            ("vocabulary", config.vocab_size.to_string()),
            ("context", config.max_position_embeddings.to_string()),
            ("attention heads", a.num_attention_heads.to_string()),
            ("q_lora_rank", a.q_lora_rank.map_or("none".to_owned(), |n| n.to_string())),
            ("kv_lora_rank", a.kv_lora_rank.to_string()),
            ("head, nope + rope", format!("{} + {}", a.qk_nope_head_dim, a.qk_rope_head_dim)),
            ("head, values", a.v_head_dim.to_string()),
        ];
        let dense_width = widths(|ffn| match *ffn {
            FfnConfig::Dense { intermediate_size } => Some(intermediate_size),
            FfnConfig::Moe { .. } => None,
        });
        facts.extend(dense_width.map(|width| ("dense width", width)));
        if let Some(moe) = &config.moe {
            facts.push(("routed experts", moe.n_routed_experts.to_string()));
            facts.push(("experts per token", moe.num_experts_per_tok.to_string()));
        }
        let expert_width = widths(|ffn| match *ffn {
            FfnConfig::Moe { moe_intermediate_size, .. } => Some(moe_intermediate_size),
            FfnConfig::Dense { .. } => None,
        });
        facts.extend(expert_width.map(|width| ("expert width", width)));
        let shared_width = widths(|ffn| match *ffn {
            FfnConfig::Moe { shared_intermediate_size, .. } => Some(shared_intermediate_size),
            FfnConfig::Dense { .. } => None,
        });
        facts.extend(shared_width.map(|width| ("shared width", width)));
        if let Some(indexer) = &config.indexer {
            let own = config.layers.iter().filter(|layer| layer.indexer == Some(IndexerRole::Full)).count();
            facts.push(("indexers", format!("{own}, {} heads each", indexer.index_n_heads)));
        }
        facts
    }

    fn memory_map(&self, page: &mut String) {
        let ranks = self.bytes_by_group();
        let all: Vec<u64> =
            Group::ALL.iter().map(|&group| ranks.iter().map(|rank| rank[group as usize]).sum()).collect();
        let total: u64 = all.iter().sum();
        let _ = writeln!(
            page,
            "<h2>What each rank holds</h2>\n<p>{}. A bar is a rank's file, to scale; point at a segment for its numbers.</p>\n<div class=\"card\">",
            sentence(&self.cut_text()).trim_end_matches('.')
        );
        draw::memory_map(page, &ranks);
        page.push_str("</div>\n<div class=\"card\"><table>\n");
        head(
            page,
            &[
                ("group", Align::Left),
                ("bytes per rank", Align::Right),
                ("all ranks", Align::Right),
                ("share", Align::Right),
                ("holds", Align::Left),
            ],
        );
        for group in shown(&ranks) {
            let own: Vec<u64> = ranks.iter().map(|rank| rank[group as usize]).collect();
            let _ = writeln!(
                page,
                "<tr><td class=\"key\">{}{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td>{}</td></tr>",
                draw::swatch(group),
                group.label(),
                spread(&own),
                human_bytes(all[group as usize]),
                percent(all[group as usize], total),
                group.holds()
            );
        }
        let sums: Vec<u64> = ranks.iter().map(|rank| rank.iter().sum()).collect();
        let _ = writeln!(
            page,
            "<tr class=\"total\"><td>total</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td class=\"num\">{}</td><td></td></tr>\n</table></div>",
            spread(&sums),
            human_bytes(total),
            percent(total, total)
        );
        per_rank(page, &ranks);
    }

    fn types(&self, page: &mut String) {
        let flows = self.flows();
        page.push_str(
            "<h2>Types</h2>\n<p>From the source's types on the left to the checkpoint's on the right, in bytes. Every tensor \
             counts once, however many ranks have it.</p>\n<div class=\"card\">\n",
        );
        draw::types(page, &flows);
        page.push_str("</div>\n<div class=\"card\"><table>\n");
        let columns = [
            ("from", Align::Left),
            ("to", Align::Left),
            ("tensors", Align::Right),
            ("in the source", Align::Right),
            ("stored", Align::Right),
        ];
        let rows: Vec<Vec<String>> = flows
            .iter()
            .map(|((from, to), flow)| {
                vec![
                    from.to_string(),
                    to.to_string(),
                    flow.tensors.to_string(),
                    human_bytes(flow.source_bytes),
                    human_bytes(flow.stored_bytes),
                ]
            })
            .collect();
        table(page, &columns, &rows);
        page.push_str("</table></div>\n");
    }

    /// A tensor made of several is shared out among them by their numbers of elements.
    fn flows(&self) -> Flows {
        let mut flows = Flows::new();
        for tensor in &self.tensors {
            let stored = bytes_of(tensor.dtype(), &tensor.shape).unwrap_or(0);
            let sources = tensor.transform.sources();
            let elements: u64 = sources.iter().map(|source| source.shape.elements()).sum();
            for source in sources {
                let share = |bytes: u64| {
                    (u128::from(bytes) * u128::from(source.shape.elements()) / u128::from(elements.max(1)))
                        as u64
                };
                let flow = flows.entry((source.dtype, tensor.dtype())).or_default();
                flow.tensors += 1;
                // Half of a fused tensor is as long as what is made of it.
                let own = if source.dtype == tensor.dtype() {
                    Some(stored)
                } else {
                    bytes_of(source.dtype, &source.shape)
                };
                flow.source_bytes += own.unwrap_or(0);
                flow.stored_bytes += share(stored);
            }
        }
        flows
    }

    fn tensors(&self, page: &mut String) {
        let (columns, rows) = self.role_rows();
        let _ = writeln!(
            page,
            "<h2>Tensors</h2>\n<p>One row for all tensors of a role that have the same types and the same cut; {} in each rank file.</p>\n<div class=\"card\"><table>",
            count(self.tensors.len(), "tensor")
        );
        table(page, &columns, &rows);
        page.push_str("</table></div>\n");
    }

    fn left_out(&self, page: &mut String) {
        page.push_str("<h2>Skipped</h2>\n");
        if self.skipped.is_empty() {
            page.push_str("<p>Nothing: every tensor of the source is used.</p>\n");
            return;
        }
        let _ = writeln!(
            page,
            "<p>{} of the source not used.</p>\n<div class=\"card\"><table>",
            count(self.skipped.len(), "tensor")
        );
        head(page, &[("tensors", Align::Right), ("names", Align::Left), ("reason", Align::Left)]);
        for (reason, names) in self.skipped_by_reason() {
            let _ = writeln!(
                page,
                "<tr><td class=\"num\">{}</td><td><code>{}</code></td><td>{}</td></tr>",
                names.len(),
                escape(&some_names(&names)),
                escape(reason)
            );
        }
        page.push_str("</table></div>\n");
    }
}

/// A row for each run of ranks that hold the same.
fn per_rank(page: &mut String, ranks: &[GroupBytes]) {
    page.push_str("<div class=\"card wide\"><table>\n");
    let groups = shown(ranks);
    let mut columns = vec![("ranks", Align::Left)];
    columns.extend(groups.iter().map(|group| (group.label(), Align::Right)));
    columns.push(("file", Align::Right));
    let mut rows = Vec::new();
    let mut first = 0;
    for run in ranks.chunk_by(|a, b| a == b) {
        let last = first + run.len() - 1;
        let mut row = vec![if first == last { first.to_string() } else { format!("{first} to {last}") }];
        row.extend(groups.iter().map(|&group| human_bytes(run[0][group as usize])));
        row.push(human_bytes(run[0].iter().sum()));
        rows.push(row);
        first = last + 1;
    }
    head(page, &columns);
    for row in &rows {
        cells(page, &columns, row, "");
    }
    page.push_str("</table></div>\n");
}

/// The groups that any rank has.
fn shown(ranks: &[GroupBytes]) -> Vec<Group> {
    let there = |group: &Group| ranks.iter().any(|rank| rank[*group as usize] > 0);
    Group::ALL.into_iter().filter(there).collect()
}

fn tile(page: &mut String, value: &str, label: &str) {
    let _ = writeln!(page, "<div class=\"tile\"><b>{value}</b><span>{label}</span></div>");
}

/// All rows of a text report's table; a last row that begins with "total" stands out.
fn table(page: &mut String, columns: &[(&str, Align)], rows: &[Vec<String>]) {
    head(page, columns);
    for row in rows {
        let class = if row.first().is_some_and(|cell| cell == "total") { " class=\"total\"" } else { "" };
        cells(page, columns, row, class);
    }
}

fn head(page: &mut String, columns: &[(&str, Align)]) {
    page.push_str("<tr>");
    for (name, align) in columns {
        let _ = write!(page, "<th{}>{name}</th>", class(*align));
    }
    page.push_str("</tr>\n");
}

fn cells(page: &mut String, columns: &[(&str, Align)], row: &[String], row_class: &str) {
    let _ = write!(page, "<tr{row_class}>");
    for (cell, (name, align)) in row.iter().zip(columns) {
        let cell = escape(cell);
        let _ = match *name {
            "tensor" if cell != "total" => write!(page, "<td><code>{cell}</code></td>"),
            _ => write!(page, "<td{}>{cell}</td>", class(*align)),
        };
    }
    page.push_str("</tr>\n");
}

fn class(align: Align) -> &'static str {
    match align {
        Align::Left => "",
        Align::Right => " class=\"num\"",
    }
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn percent(part: u64, whole: u64) -> String {
    let percent = part as f64 / whole.max(1) as f64 * 100.0;
    if part > 0 && percent < 0.05 { "&lt; 0.1 %".to_owned() } else { format!("{percent:.1} %") }
}

/// With a capital letter and a full stop, unless it is empty.
fn sentence(text: &str) -> String {
    let mut rest = text.chars();
    match rest.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), rest.as_str()),
        None => String::new(),
    }
}

/// Text of a file, fit for an element or a quoted attribute; control characters, which a page may not have, are spelled out.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c if c.is_control() => escaped.extend(c.escape_default()),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        assert_eq!(
            escape("<script>alert('x')</script> & \"y\"\n\u{7}"),
            "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &quot;y&quot;\\n\\u{7}"
        );
    }

    #[test]
    fn small_shares_are_not_nothing() {
        assert_eq!(percent(1, 1_000_000), "&lt; 0.1 %");
        assert_eq!(percent(0, 5), "0.0 %");
        assert_eq!(percent(1, 3), "33.3 %");
    }
}
