//! The plan as a page: what its structure says, what a browser makes of it, and what becomes of a hostile file's words.

use crate::files::{bundled, options, refused, shardmill};
use converter::plan::Plan;
use formats::gguf::GgufSet;
use formats::manifest::Skipped;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// An element that was opened, with the text up to the next tag.
struct Element {
    name: String,
    attributes: BTreeMap<String, String>,
    /// The names of the elements around it, outermost first.
    inside: Vec<String>,
    text: String,
}

/// Reads a page as strictly as XML is read: every element is closed in order, every attribute quoted.
fn elements(page: &str) -> Vec<Element> {
    let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
    let (mut open, mut found): (Vec<String>, Vec<Element>) = (Vec::new(), Vec::new());
    let mut rest = body.trim();
    while let Some(tag) = rest.strip_prefix('<') {
        let (tag, after) = tag.split_once('>').unwrap();
        let text = after.split('<').next().unwrap();
        assert!(!text.contains('>') && !tag.contains('<'), "<{tag}>{text}");
        rest = &after[text.len()..];
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed), "</{closed}>");
            continue;
        }
        let (name, mut attributes) = tag.split_once(' ').unwrap_or((tag.trim_end_matches('/'), ""));
        let mut named = BTreeMap::new();
        while let Some((key, value)) = attributes.split_once("=\"") {
            let (value, after) = value.split_once('"').unwrap();
            assert!(named.insert(key.trim().to_owned(), value.to_owned()).is_none(), "<{tag}>");
            attributes = after;
        }
        assert!(matches!(attributes, "" | "/"), "<{tag}>: {attributes}");
        found.push(Element {
            name: name.to_owned(),
            attributes: named,
            inside: open.clone(),
            text: text.to_owned(),
        });
        if !tag.ends_with('/') && name != "meta" {
            open.push(name.to_owned());
        }
    }
    assert!(rest.is_empty() && open.is_empty(), "not closed: {open:?}");
    found
}

fn plan(ranks: usize) -> (GgufSet, Plan) {
    let set = GgufSet::open(&bundled().gguf).unwrap();
    let plan = Plan::new(&set, options(ranks)).unwrap();
    (set, plan)
}

#[test]
fn every_rank_has_one_segment_for_each_group_and_they_make_up_its_file() {
    for ranks in [1, 3, 8, 100, 1024] {
        let (set, plan) = plan(ranks);
        let page = plan.html(&set);
        let all = elements(&page);
        let segments: Vec<&Element> = all
            .iter()
            .filter(|e| e.name == "rect" && e.attributes.get("class").is_some_and(|c| c.starts_with("s g")))
            .collect();
        let titles = all.iter().filter(|e| e.name == "title" && e.text.starts_with("rank "));
        let mut groups: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        let mut widths = vec![0.0; ranks];
        let mut end = 0.0;
        for (segment, title) in segments.iter().zip(titles.clone()) {
            let (rank, label) = title.text["rank ".len()..].split_once(", ").unwrap();
            let rank: usize = rank.parse().unwrap();
            assert!(groups.entry(rank).or_default().insert(label.split(':').next().unwrap()), "{label}");
            let number = |key: &str| segment.attributes[key].parse::<f64>().unwrap();
            // Each begins where the one before it ends.
            assert!(widths[rank] == 0.0 || (number("x") - end).abs() < 0.01, "rank {rank}: {label}");
            widths[rank] += number("width");
            end = number("x") + number("width");
        }
        assert_eq!((segments.len(), groups.len()), (titles.count(), ranks));
        assert!(groups[&0].len() == 11 && groups[&0].contains("kv_b"), "{:?}", groups[&0]);
        let most = plan.layouts.iter().map(|layout| layout.bytes).max().unwrap() as f64;
        let widest = widths.iter().copied().fold(0.0, f64::max);
        for (layout, width) in plan.layouts.iter().zip(&widths) {
            let share = layout.bytes as f64 / most;
            assert!((width / widest - share).abs() < 1e-5, "rank {}: {width} of {widest}", layout.rank);
        }
    }
}

#[test]
fn a_page_has_everything_and_fetches_nothing() {
    let (set, plan) = plan(3);
    let page = plan.html(&set);
    for outside in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<script", "<link"] {
        assert!(!page.contains(outside), "{outside}");
    }
    for said in [
        "Hf",
        "glm-dsa",
        "tiny-glm5-UD-Q2_K.gguf",
        "prefers-color-scheme:dark",
        "disk needed",
        "memory at most",
        "% above the mean",
        "...self_attn.kv_b_proj.weight",
        "every tensor of the source is used",
    ] {
        assert!(page.contains(said), "{said}");
    }
    let bands =
        elements(&page).into_iter().filter(|e| e.name == "path" && e.inside.contains(&"svg".to_owned()));
    let pairs: BTreeSet<_> = plan
        .tensors
        .iter()
        .flat_map(|t| t.transform.sources().into_iter().map(|source| (source.dtype, t.dtype())))
        .collect();
    assert_eq!(bands.count(), pairs.len(), "one for each pair of types");
    assert_eq!(page, plan.html(&set));
}

#[test]
fn a_hostile_name_is_text() {
    let (set, mut plan) = plan(2);
    let hostile = "</title><script>alert('1')</script><img src=x onerror=\"alert(2)\">&lt;\u{0}\u{1b}[2J";
    let safe = plan.html(&set);
    plan.model.name = hostile.to_owned();
    plan.skipped = vec![Skipped { tensor: hostile.to_owned(), reason: hostile.to_owned() }];
    let page = plan.html(&set);
    let count = |page: &str, name: &str| elements(page).iter().filter(|e| e.name == name).count();
    for name in ["script", "img", "title", "h1", "main"] {
        assert_eq!(count(&page, name), count(&safe, name), "{name}");
    }
    assert!(page.contains("&lt;/title&gt;&lt;script&gt;alert(&#39;1&#39;)"));
    assert!(page.contains("&amp;lt;\\u{0}\\u{1b}[2J"), "an entity in the file is not one in the page");
}

#[test]
fn a_page_that_exists_is_replaced_only_by_force() {
    let temp = TempDir::new().unwrap();
    let page = temp.path().join("plan.html");
    std::fs::write(&page, "mine").unwrap();
    let planning =
        || shardmill(&["plan".as_ref(), bundled().gguf.as_os_str(), "--html".as_ref(), page.as_os_str()]);
    let said = refused(&mut planning(), 2);
    assert!(said.contains("already a file") && said.contains("plan.html"), "{said}");
    assert_eq!(std::fs::read(&page).unwrap(), b"mine");
    let output = planning().arg("--force").output().unwrap();
    assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains("plan.html"));
    elements(&std::fs::read_to_string(&page).unwrap());
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    refused(&mut shardmill(&["plan".as_ref(), bundled().gguf.as_os_str(), "--force".as_ref()]), 2);
}

/// Width and height of a PNG file.
fn png_size(bytes: &[u8]) -> (u32, u32) {
    assert_eq!(&bytes[..8], b"\x89PNG\r\n\x1a\n");
    let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    (number(16), number(20))
}

#[test]
fn a_browser_draws_it() {
    let temp = TempDir::new().unwrap();
    if Command::new("chromium").arg("--version").output().is_err() {
        std::io::stderr().write_all(b"NOT RUN without chromium\n").unwrap();
        return;
    }
    let (set, plan) = plan(8);
    let shot = |name: &str, page: &str| -> Vec<u8> {
        let file = temp.path().join(format!("{name}.html"));
        std::fs::write(&file, page).unwrap();
        screenshot(&file, &temp.path().join(name))
    };
    let drawn = shot("plan", &plan.html(&set));
    let blank = shot("blank", "<!DOCTYPE html><title>blank</title>");
    assert_eq!((png_size(&drawn), png_size(&blank)), ((1000, 1400), (1000, 1400)));
    // Deflate leaves next to nothing of one colour, and text and bars of a page are many times that.
    assert!(drawn.len() > 10 * blank.len(), "{} bytes, a blank page has {}", drawn.len(), blank.len());
}

fn screenshot(page: &Path, work: &Path) -> Vec<u8> {
    let png = work.with_extension("png");
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1400"])
        .arg(format!("--user-data-dir={}", work.display()))
        .arg(format!("--screenshot={}", png.display()))
        .arg(page)
        .output()
        .unwrap();
    std::fs::read(&png).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}
