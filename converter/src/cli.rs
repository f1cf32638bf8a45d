//! The command line: arguments, what is printed, exit codes.

use crate::execute;
use crate::extract::extract;
use crate::inspect::inspect;
use crate::plan::{Options, UnknownTensors, WeightLayout};
use crate::reference;
use crate::verify::{self, verify};
use crate::work::{Control, Progress};
use crate::writer::{Existing, NewFile, Unfinished};
use crate::{Conversion, Error, error::human_bytes};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use formats::manifest::{ExpertCut, MAX_RANKS};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Turns GGUF files of MLA + mixture-of-experts models into native checkpoints: one file per GPU, every weight cut, rejoined
/// and in the precision that the model needs.
#[derive(Parser, Debug)]
#[command(name = "shardmill", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  shardmill plan GLM-5-UD-Q4_K_XL-00001-of-00009.gguf --ranks 8
  shardmill convert GLM-5-UD-Q4_K_XL-00001-of-00009.gguf glm-5 --ranks 8
  shardmill verify glm-5 --source GLM-5-UD-Q4_K_XL-00001-of-00009.gguf

Exit codes: 0 done, 1 the check failed (verify), 2 bad input or usage, 130 interrupted.";

const CONVERT_HELP: &str = "\
Examples:
  shardmill convert model-00001-of-00003.gguf checkpoint --ranks 8
  shardmill convert model-00001-of-00003.gguf checkpoint --ranks 8 --resume
  shardmill convert model-00001-of-00003.gguf checkpoint --ranks 8 --rank 0 --rank 1

Interruptions: the work lies in OUT.partial until it is whole, and never opens as a checkpoint before. After Ctrl-C, a full
disk, a failing one or a crash, what is done is kept there, and --resume goes on with it: chunks are kept whose bytes still have
the digests that were noted for them, and the result is the same byte for byte. A fault of the source removes OUT.partial, since
no second run would get further. A second Ctrl-C ends at once and loses at most the last chunks.

Ranks apart: with --rank, several machines share the work. Each adds its ranks to OUT, or to a directory of its own whose files
are then copied together, *.origin included. OUT has no checkpoint.json, and does not open, before `shardmill finish` with the
same source and options has checked them all. Only what these ranks need of the source is read.";

#[derive(Subcommand, Debug)]
enum Command {
    /// Shows what `convert` would do, without reading more than the headers.
    #[command(
        after_help = "Examples:\n  shardmill plan model.gguf --ranks 4 --experts expert\n  shardmill plan model.gguf --html plan.html"
    )]
    Plan {
        #[command(flatten)]
        input: Input,
        /// Write the plan as an HTML page to this file, for a browser.
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
        /// Replace an HTML file that exists.
        #[arg(long, requires = "html")]
        force: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Converts a GGUF model to a checkpoint directory.
    #[command(after_help = CONVERT_HELP)]
    Convert {
        #[command(flatten)]
        input: Input,
        /// The checkpoint's directory; it must not exist. With --rank it may hold other ranks of the same conversion.
        out: PathBuf,
        /// Go on with an interrupted conversion of the same source and options; from the beginning when there is none.
        #[arg(long)]
        resume: bool,
        /// Make only this rank's files, 0 for the first; may be given several times.
        #[arg(long, value_name = "R")]
        rank: Vec<u16>,
        #[command(flatten)]
        work: Work,
    },
    /// Makes a checkpoint of the ranks that `convert --rank` put into a directory.
    ///
    /// Give the source and the options that the ranks were made with. Every rank file is held against its manifest and the whole
    /// source is read for its digests; the result is byte for byte what one `convert` of all ranks writes.
    ///
    /// That the ranks were made from this very source is known by the names, sizes and headers of its files. A source whose
    /// weights changed behind an equal header is not noticed here: `verify --source` compares every weight.
    #[command(after_help = "Example:\n  shardmill finish model-00001-of-00003.gguf checkpoint --ranks 8")]
    Finish {
        #[command(flatten)]
        input: Input,
        /// The directory that holds all ranks.
        out: PathBuf,
        #[command(flatten)]
        work: Work,
    },
    /// Checks a checkpoint against its digests and manifests and, with --source, against the GGUF files.
    #[command(after_help = "Example:\n  shardmill verify checkpoint --source model-00001-of-00003.gguf")]
    Verify {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The GGUF file that it was made from; any part of a split one.
        #[arg(long)]
        source: Option<PathBuf>,
        #[command(flatten)]
        work: Work,
    },
    /// Shows what is in a GGUF file of any architecture, a checkpoint or a rank file.
    #[command(
        after_help = "Examples:\n  shardmill inspect model.gguf\n  shardmill inspect checkpoint --tensor model.layers.3.self_attn.kv_b_proj.weight"
    )]
    Inspect {
        /// GGUF file, checkpoint directory or rank file.
        path: PathBuf,
        /// Only this tensor, by its GGUF or native name.
        #[arg(long)]
        tensor: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Writes one tensor, whole and as f32, to a safetensors file.
    #[command(
        after_help = "Examples:\n  shardmill extract model.gguf --tensor blk.3.attn_k_b.weight --out k_b.safetensors\n  shardmill extract checkpoint --tensor model.layers.3.self_attn.kv_b_proj.weight --out kv_b.safetensors"
    )]
    Extract {
        /// GGUF file or checkpoint directory.
        input: PathBuf,
        /// Its GGUF or native name, which is also its name in the file written.
        #[arg(long)]
        tensor: String,
        /// The file to write.
        #[arg(long)]
        out: PathBuf,
        /// Replace a file that exists.
        #[arg(long)]
        force: bool,
        /// Print what was written as JSON.
        #[arg(long)]
        json: bool,
    },
    /// Prints the completions of a shell.
    #[command(after_help = "Example:\n  shardmill completions bash > /etc/bash_completion.d/shardmill")]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes the manual pages, one for each command, to a directory.
    #[command(after_help = "Example:\n  shardmill man /usr/local/share/man/man1")]
    Man {
        /// The directory; made if it is not there. Pages of the same names are replaced.
        dir: PathBuf,
    },
}

#[derive(Args, Debug)]
struct Input {
    /// The GGUF file; any part of a split one.
    input: PathBuf,
    /// Rank files to make: one for each GPU.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=MAX_RANKS as i64))]
    ranks: u16,
    /// How routed experts are cut.
    #[arg(long, value_enum, default_value_t = Experts::Tensor)]
    experts: Experts,
    /// How weights are arranged.
    #[arg(long, value_enum, default_value_t = Arrangement::Ggml)]
    layout: Arrangement,
    /// Leave out tensors that are not known for this model, instead of refusing them.
    #[arg(long)]
    allow_unknown: bool,
}

/// How long work is done, and what is said of it.
#[derive(Args, Debug)]
struct Work {
    /// Threads; one for each CPU and four that wait for disks unless given, at most 48.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Nothing but errors and failures: no progress, and no word when all is well.
    #[arg(long, short)]
    quiet: bool,
    /// Print what was done or found as JSON.
    #[arg(long)]
    json: bool,
}

impl Work {
    fn control(&self, interrupt: Arc<AtomicBool>, quiet: bool) -> Control {
        let progress = if quiet { Progress::Quiet } else { Progress::Shown };
        Control::new(self.threads.map(usize::from), interrupt, progress)
    }

    fn print(&self, summary: &execute::Summary) -> Result<(), Error> {
        match (self.json, self.quiet) {
            (true, _) => print_json(summary),
            (false, true) => Ok(()),
            (false, false) => print(&summary_text(summary)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experts {
    /// Every rank has a slice of every expert.
    Tensor,
    /// Every rank has some experts whole.
    Expert,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Arrangement {
    /// As GGUF has them, for any device.
    Ggml,
    /// In tiles for the tensor cores of GPUs (mma16.v1), of the same size; Q4_0, Q5_0, Q8_0, Q4_K, Q5_K and Q6_K only, the others
    /// stay as they are.
    Mma16,
}

impl Input {
    fn prepare(&self) -> Result<Conversion, Error> {
        let options = Options {
            ranks: self.ranks.into(),
            experts: match self.experts {
                Experts::Tensor => ExpertCut::Tensor,
                Experts::Expert => ExpertCut::Expert,
            },
            unknown: if self.allow_unknown { UnknownTensors::Skip } else { UnknownTensors::Refuse },
            layout: match self.layout {
                Arrangement::Ggml => WeightLayout::Ggml,
                Arrangement::Mma16 => WeightLayout::Mma16,
            },
        };
        Conversion::prepare(&self.input, options)
    }
}

/// How a command that did its work ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 0.
    Done,
    /// Exit code 1: the checkpoint is not right.
    CheckFailed,
}

impl Cli {
    /// Does what the arguments say and prints it. Work stops when `interrupt` becomes true.
    ///
    /// # Errors
    /// Any error of the library.
    pub fn run(self, interrupt: Arc<AtomicBool>) -> Result<Outcome, Error> {
        match self.command {
            Command::Plan { input, html, force, json } => {
                let Conversion { set, plan, .. } = input.prepare()?;
                let written = html.map(|html| write_page(&html, &plan.html(&set), force)).transpose()?;
                match (json, written) {
                    (true, _) => print_json(&plan.report())?,
                    (false, Some(written)) => print(&written)?,
                    (false, None) => print(&plan.text())?,
                }
            }
            Command::Convert { input, out, resume, rank, work } => {
                let Conversion { set, plan, side_files } = input.prepare()?;
                let unfinished = if resume { Unfinished::Resume } else { Unfinished::Refuse };
                let control = work.control(interrupt, work.quiet);
                let summary = if rank.is_empty() {
                    execute::convert(&set, &plan, &side_files, &out, unfinished, &control)?
                } else {
                    let ranks: Vec<usize> = rank.into_iter().map(usize::from).collect();
                    execute::convert_ranks(&set, &plan, &ranks, &out, unfinished, &control)?
                };
                work.print(&summary)?;
            }
            Command::Finish { input, out, work } => {
                let Conversion { set, plan, side_files } = input.prepare()?;
                let control = work.control(interrupt, work.quiet);
                work.print(&execute::finish(&set, &plan, &side_files, &out, &control)?)?;
            }
            Command::Verify { dir, source, work } => {
                let control = work.control(interrupt, work.quiet || work.json);
                let report = verify(&dir, source.as_deref(), &control)?;
                match (work.json, work.quiet && report.ok) {
                    (true, _) => print_json(&report)?,
                    (false, true) => {}
                    (false, false) => print(&report_text(&report))?,
                }
                if !report.ok {
                    return Ok(Outcome::CheckFailed);
                }
            }
            Command::Inspect { path, tensor, json } => {
                let found = inspect(&path, tensor.as_deref())?;
                if json { print_json(&found.json) } else { print(&found.text) }?;
            }
            Command::Completions { shell } => write_stdout(&reference::completions(shell))?,
            Command::Man { dir } => {
                let count = reference::man_pages(&dir)?;
                print(&format!(
                    "{}: {count} pages; read them with `man -l {0}/shardmill.1`\n",
                    dir.display()
                ))?;
            }
            Command::Extract { input, tensor, out, force, json } => {
                let existing = if force { Existing::Replace } else { Existing::Refuse };
                let control = Control::new(Some(1), interrupt, Progress::Quiet);
                let written = extract(&input, &tensor, &out, existing, &control)?;
                if json {
                    print_json(&written)?;
                } else {
                    print(&format!(
                        "{}: {} F32 {}, {}, from {}\n",
                        written.out.display(),
                        written.tensor,
                        written.shape,
                        human_bytes(written.bytes),
                        written.made_from.join(" and ")
                    ))?;
                }
            }
        }
        Ok(Outcome::Done)
    }
}

/// Writes the page beside its name first, and says what was written.
fn write_page(path: &Path, page: &str, force: bool) -> Result<String, Error> {
    let existing = if force { Existing::Replace } else { Existing::Refuse };
    let (new, mut file) = NewFile::create(path, existing)?;
    let action = || format!("cannot write {} bytes", page.len());
    file.write_all(page.as_bytes()).map_err(|e| Error::io(new.partial(), action(), e))?;
    new.commit(&file)?;
    Ok(format!("{}: {}, open it in a browser\n", path.display(), human_bytes(page.len() as u64)))
}

fn summary_text(summary: &execute::Summary) -> String {
    let kept = match summary.kept_bytes {
        0 => String::new(),
        bytes => format!(", {} of them kept", human_bytes(bytes)),
    };
    format!(
        "{}: {} rank files, {} tensors each ({} skipped), {}{kept} from {} in {:.1} s ({:.2} GB/s read and written)\n",
        summary.out.display(),
        summary.ranks,
        summary.tensors,
        summary.skipped,
        human_bytes(summary.rank_bytes),
        human_bytes(summary.read_bytes),
        summary.seconds,
        (summary.read_bytes + summary.rank_bytes) as f64 / 1e9 / summary.seconds
    )
}

fn report_text(report: &verify::Report) -> String {
    /// Failures that are printed; JSON has all of them.
    const PRINTED: usize = 20;
    let mut text = String::new();
    let dir = report.dir.display();
    // Writing to a String cannot fail.
    if !report.ok {
        for failure in report.failures.iter().take(PRINTED) {
            let _ = writeln!(text, "{}", one_line(failure));
        }
        if let Some(more) = report.failures.len().checked_sub(PRINTED).filter(|&n| n > 0) {
            let _ = writeln!(text, "... and {more} more; --json lists all");
        }
        let _ = writeln!(text, "{dir}: FAILED, {} faults", report.failures.len());
        return text;
    }
    let _ = writeln!(text, "{dir}: ok");
    let _ = writeln!(
        text,
        "  files    {} with {} ({} rank files): every digest is right",
        report.files,
        human_bytes(report.bytes),
        report.ranks
    );
    let _ = writeln!(
        text,
        "  tensors  {}: {} cut, whose parts make up the whole; {} on every rank",
        report.tensors,
        report.cut,
        report.tensors - report.cut
    );
    let mut bytes = report.bytes;
    if let Some(source) = &report.source {
        bytes += source.bytes;
        let _ = writeln!(
            text,
            "  source   {} in {} file{}, as the conversion read: {} tensors are its own bytes, {} dequantised and {} rejoined ones are right bit for bit",
            human_bytes(source.bytes),
            source.files,
            if source.files == 1 { "" } else { "s" },
            source.copied,
            source.dequantized,
            source.joined
        );
    }
    let _ = writeln!(text, "  {:.1} s, {:.2} GB/s", report.seconds, bytes as f64 / 1e9 / report.seconds);
    text
}

/// Prints to stdout, control characters of names in files escaped; a reader that has seen enough is no error.
fn print(text: &str) -> Result<(), Error> {
    write_stdout(escaped(text, Some('\n')).as_bytes())
}

/// Prints as JSON. What a terminal would obey or hide is escaped as JSON escapes it, so that every reader gets it back.
fn print_json(value: &impl Serialize) -> Result<(), Error> {
    let mut text = serde_json::to_string_pretty(value).expect("reports always become JSON");
    text.push('\n');
    let escape = |c: char, out: &mut String| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(out, "\\u{unit:04x}");
        }
    };
    write_stdout(escaped_by(&text, Some('\n'), escape).as_bytes())
}

fn write_stdout(bytes: &[u8]) -> Result<(), Error> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Io { path: "stdout".into(), action: "cannot write".to_owned(), source: e })
        }
        _ => Ok(()),
    }
}

/// The text without line breaks and other control characters, whatever a file's names hold.
pub fn one_line(text: &str) -> String {
    escaped(text, None)
}

fn escaped(text: &str, kept: Option<char>) -> String {
    escaped_by(text, kept, |c, out| out.extend(c.escape_default()))
}

fn escaped_by(text: &str, kept: Option<char>, escape: impl Fn(char, &mut String)) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if !formats::is_plain(c) && Some(c) != kept {
            escape(c, &mut escaped);
        } else {
            escaped.push(c);
        }
    }
    escaped
}
