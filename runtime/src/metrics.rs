//! What an engine counts, under the names that vLLM's dashboards ask for, in Prometheus' text format.

use crate::engine::FinishReason;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Seconds, upper ends of a histogram's buckets.
const FIRST_TOKEN: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];
const BETWEEN_TOKENS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
];
const REQUEST: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0,
];

/// Counters, gauges and histograms of one engine.
#[derive(Debug)]
pub struct Metrics {
    running: AtomicU64,
    waiting: AtomicU64,
    blocks_used: AtomicU64,
    blocks: AtomicU64,
    on_older_weights: AtomicU64,
    prompt_tokens: AtomicU64,
    generation_tokens: AtomicU64,
    prefix_queries: AtomicU64,
    prefix_hits: AtomicU64,
    preemptions: AtomicU64,
    stopped: AtomicU64,
    length: AtomicU64,
    aborted: AtomicU64,
    failed: AtomicU64,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    pub(crate) e2e_latency: Histogram,
    pub(crate) queue_time: Histogram,
    reloads: [AtomicU64; 3],
    scrubs: [AtomicU64; 2],
    load: Mutex<Load>,
}

/// How the weights that are served were loaded, and what scrubbing found of them.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Seconds until every rank was ready.
    pub seconds: f64,
    /// Which set of weights this is, counted from 1.
    pub generation: u64,
    /// Digest of the rank files' digests.
    pub digest: String,
    /// By rank.
    pub ranks: Vec<RankLoad>,
}

/// How a rank was loaded.
#[derive(Clone, Debug, Default)]
pub struct RankLoad {
    /// Bytes of its file.
    pub bytes: u64,
    /// Seconds that reading or mapping it took.
    pub seconds: f64,
    /// Bytes read in a second, in GB; `None` where the file was mapped and not read.
    pub gb_per_s: Option<f64>,
    /// Whether the last scrubbing found it damaged or could not read it.
    pub is_damaged: bool,
}

/// How a reload ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// New weights are served.
    Done,
    /// Everything is as it was.
    Refused,
    /// There was nothing new.
    Nothing,
}

/// What a moment of the engine looks like.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moment {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) blocks_used: usize,
    pub(crate) blocks: usize,
    pub(crate) preemptions: u64,
}

impl Moment {
    pub(crate) fn add(&mut self, other: Self) {
        self.running += other.running;
        self.waiting += other.waiting;
        self.blocks_used += other.blocks_used;
        self.blocks += other.blocks;
        self.preemptions += other.preemptions;
    }
}

impl Metrics {
    /// All at nothing. `blocks` is the size of the cache.
    pub fn new(blocks: usize, load: Load) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            running: zero(),
            waiting: zero(),
            blocks_used: zero(),
            blocks: AtomicU64::new(blocks as u64),
            on_older_weights: zero(),
            prompt_tokens: zero(),
            generation_tokens: zero(),
            prefix_queries: zero(),
            prefix_hits: zero(),
            preemptions: zero(),
            stopped: zero(),
            length: zero(),
            aborted: zero(),
            failed: zero(),
            time_to_first_token: Histogram::new(FIRST_TOKEN),
            inter_token_latency: Histogram::new(BETWEEN_TOKENS),
            e2e_latency: Histogram::new(REQUEST),
            queue_time: Histogram::new(REQUEST),
            reloads: [zero(), zero(), zero()],
            scrubs: [zero(), zero()],
            load: Mutex::new(load),
        }
    }

    /// `older` of those that run do so on weights that new requests no longer go to.
    pub(crate) fn set(&self, moment: Moment, older: usize) {
        self.on_older_weights.store(older as u64, Ordering::Relaxed);
        self.blocks.store(moment.blocks as u64, Ordering::Relaxed);
        self.running.store(moment.running as u64, Ordering::Relaxed);
        self.waiting.store(moment.waiting as u64, Ordering::Relaxed);
        self.blocks_used.store(moment.blocks_used as u64, Ordering::Relaxed);
        self.preemptions.store(moment.preemptions, Ordering::Relaxed);
    }

    pub(crate) fn prompt_done(&self, tokens: usize, reused: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.prefix_queries.fetch_add(tokens as u64, Ordering::Relaxed);
        self.prefix_hits.fetch_add(reused as u64, Ordering::Relaxed);
    }

    pub(crate) fn generated(&self) {
        self.generation_tokens.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn finished(&self, reason: FinishReason) {
        let counter = match reason {
            FinishReason::Stop(_) | FinishReason::Complete => &self.stopped,
            FinishReason::Length => &self.length,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn aborted(&self) {
        self.aborted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn reloaded(&self, how: Reloaded) {
        self.reloads[how as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn loaded(&self, load: Load) {
        *self.load() = load;
    }

    /// A rank's file was read again: whether it was as it should be.
    pub(crate) fn scrubbed(&self, rank: usize, is_damaged: bool) {
        self.scrubs[usize::from(is_damaged)].fetch_add(1, Ordering::Relaxed);
        if let Some(rank) = self.load().ranks.get_mut(rank) {
            rank.is_damaged = is_damaged;
        }
    }

    fn load(&self) -> MutexGuard<'_, Load> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything in Prometheus' text format, labelled with the model's name.
    pub fn render(&self, model: &str) -> String {
        let mut page = Page { out: String::new(), model: escape(model) };
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        page.one("vllm:num_requests_running", "gauge", "Requests that run.", read(&self.running));
        page.one("vllm:num_requests_waiting", "gauge", "Requests that wait.", read(&self.waiting));
        let usage = read(&self.blocks_used) / read(&self.blocks).max(1.0);
        page.one("vllm:kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.", usage);
        for (name, help, counter) in [
            ("vllm:prompt_tokens_total", "Tokens of prompts.", &self.prompt_tokens),
            ("vllm:generation_tokens_total", "Generated tokens.", &self.generation_tokens),
            (
                "vllm:prefix_cache_queries_total",
                "Tokens looked for in the prefix cache.",
                &self.prefix_queries,
            ),
            ("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", &self.prefix_hits),
            ("vllm:num_preemptions_total", "Sequences that were computed again.", &self.preemptions),
        ] {
            page.one(name, "counter", help, read(counter));
        }
        page.head("vllm:request_success_total", "counter", "Requests by how they ended.");
        for (reason, counter) in [
            ("stop", &self.stopped),
            ("length", &self.length),
            ("abort", &self.aborted),
            ("error", &self.failed),
        ] {
            let labels = format!(",finished_reason=\"{reason}\"");
            page.value("vllm:request_success_total", &labels, read(counter));
        }
        for (name, help, histogram) in [
            (
                "vllm:time_to_first_token_seconds",
                "From a request to its first token.",
                &self.time_to_first_token,
            ),
            ("vllm:inter_token_latency_seconds", "From a token to the next.", &self.inter_token_latency),
            ("vllm:e2e_request_latency_seconds", "From a request to its end.", &self.e2e_latency),
            ("vllm:request_queue_time_seconds", "From a request to its start.", &self.queue_time),
        ] {
            page.histogram(name, help, histogram);
        }
        self.render_weights(&mut page);
        page.out
    }

    /// What is known of the weights, under names of our own.
    fn render_weights(&self, page: &mut Page) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let load = self.load().clone();
        page.one("shardrun_load_seconds", "gauge", "Until every rank was ready.", load.seconds);
        page.one(
            "shardrun_generation",
            "counter",
            "Which set of weights is served, counted from 1.",
            load.generation as f64,
        );
        page.head("shardrun_checkpoint_info", "gauge", "1, with the digest of the weights that are served.");
        page.value("shardrun_checkpoint_info", &format!(",digest=\"{}\"", load.digest), 1.0);
        page.one(
            "shardrun_requests_on_older_weights",
            "gauge",
            "Requests that end on weights that were served before.",
            read(&self.on_older_weights),
        );
        page.head("shardrun_reloads_total", "counter", "Reloads by how they ended.");
        for (result, counter) in ["done", "refused", "nothing"].iter().zip(&self.reloads) {
            page.value("shardrun_reloads_total", &format!(",result=\"{result}\""), read(counter));
        }
        page.head("shardrun_scrubbed_files_total", "counter", "Rank files read again, by what was found.");
        for (result, counter) in ["right", "damaged"].iter().zip(&self.scrubs) {
            page.value("shardrun_scrubbed_files_total", &format!(",result=\"{result}\""), read(counter));
        }
        type OfRank = fn(&RankLoad) -> Option<f64>;
        let of_ranks: [(&str, &str, OfRank); 4] = [
            ("shardrun_rank_bytes", "Size of each rank's weights.", |rank| Some(rank.bytes as f64)),
            ("shardrun_rank_load_seconds", "Time that loading each rank took.", |rank| Some(rank.seconds)),
            (
                "shardrun_rank_load_bytes_per_second",
                "How fast each rank's file was read, where it was.",
                |rank| rank.gb_per_s.map(|rate| rate * 1e9),
            ),
            ("shardrun_rank_damaged", "1 where scrubbing found the file damaged or unreadable.", |rank| {
                Some(u8::from(rank.is_damaged).into())
            }),
        ];
        for (name, help, of_rank) in of_ranks {
            page.head(name, "gauge", help);
            for (number, rank) in load.ranks.iter().enumerate() {
                if let Some(value) = of_rank(rank) {
                    page.value(name, &format!(",rank=\"{number}\""), value);
                }
            }
        }
    }
}

/// How often something took how long.
#[derive(Debug)]
pub(crate) struct Histogram {
    ends: &'static [f64],
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// By bucket; the last is for what is longer than every end.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(ends: &'static [f64]) -> Self {
        Self { ends, seen: Mutex::new(Seen { counts: vec![0; ends.len() + 1], sum: 0.0 }) }
    }

    pub(crate) fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.counts[self.ends.partition_point(|&end| end < seconds)] += 1;
        seen.sum += seconds;
    }
}

struct Page {
    out: String,
    model: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Prometheus' counters end with _total in their samples, and so does the name here.
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.out, "{name}{{model_name=\"{}\"{labels}}} {value}", self.model);
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.value(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let seen = histogram.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sum = 0;
        let bucket = format!("{name}_bucket");
        for (at, &count) in seen.counts.iter().enumerate() {
            sum += count;
            let end = histogram.ends.get(at).map_or("+Inf".to_owned(), ToString::to_string);
            self.value(&bucket, &format!(",le=\"{end}\""), sum as f64);
        }
        self.value(&format!("{name}_sum"), "", seen.sum);
        self.value(&format!("{name}_count"), "", sum as f64);
    }
}

/// A label's value.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_prometheus_text() {
        let rank = |bytes, gb_per_s| RankLoad { bytes, seconds: 0.5, gb_per_s, is_damaged: false };
        let ranks = vec![rank(7, None), rank(8, Some(2.0))];
        let metrics = Metrics::new(10, Load { seconds: 1.5, generation: 1, digest: "ab".to_owned(), ranks });
        let moment = |running| Moment { running, waiting: 1, blocks_used: 2, blocks: 4, preemptions: 1 };
        let mut sum = moment(1);
        sum.add(Moment { waiting: 2, blocks_used: 3, blocks: 6, ..moment(1) });
        metrics.set(sum, 1);
        metrics.reloaded(Reloaded::Refused);
        metrics.scrubbed(1, true);
        metrics.prompt_done(100, 64);
        metrics.finished(FinishReason::Length);
        for millis in [1, 30, 30, 100_000] {
            metrics.inter_token_latency.observe(Duration::from_millis(millis));
        }
        let page = metrics.render("a \"model\"\n");
        let value = |name: &str| -> f64 {
            let line = page.lines().find(|line| line.starts_with(name));
            line.unwrap_or_else(|| panic!("{name} in {page}")).rsplit(' ').next().unwrap().parse().unwrap()
        };
        let label = r#"{model_name="a \"model\"\n""#;
        assert_eq!(value(&format!("vllm:num_requests_waiting{label}}}")), 3.0);
        assert_eq!(value("vllm:kv_cache_usage_perc"), 0.5);
        assert_eq!(value("vllm:prefix_cache_hits_total"), 64.0);
        assert_eq!(value(&format!("vllm:request_success_total{label},finished_reason=\"length\"}}")), 1.0);
        let bucket = |le| format!("vllm:inter_token_latency_seconds_bucket{label},le=\"{le}\"}}");
        assert_eq!([value(&bucket("0.001")), value(&bucket("0.05")), value(&bucket("80"))], [1.0, 3.0, 3.0]);
        assert_eq!((value(&bucket("+Inf")), value("vllm:inter_token_latency_seconds_count")), (4.0, 4.0));
        assert!((value("vllm:inter_token_latency_seconds_sum") - 100.061).abs() < 1e-9);
        assert_eq!(value(&format!("shardrun_rank_bytes{label},rank=\"1\"}}")), 8.0);
        assert_eq!(value(&format!("shardrun_rank_load_bytes_per_second{label},rank=\"1\"}}")), 2e9);
        assert!(!page.contains(&format!("shardrun_rank_load_bytes_per_second{label},rank=\"0\"")));
        assert_eq!(
            [0, 1].map(|rank| value(&format!("shardrun_rank_damaged{label},rank=\"{rank}\"}}"))),
            [0.0, 1.0]
        );
        assert_eq!(value(&format!("shardrun_reloads_total{label},result=\"refused\"}}")), 1.0);
        assert_eq!(value(&format!("shardrun_checkpoint_info{label},digest=\"ab\"}}")), 1.0);
        assert_eq!(value("shardrun_requests_on_older_weights"), 1.0);
        for line in page.lines().filter(|line| !line.starts_with('#')) {
            let (name, _) = line.split_once('{').unwrap();
            let family =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            assert!(page.contains(&format!("# TYPE {family} ")), "{line}");
        }
    }
}
