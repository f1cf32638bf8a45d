//! shardmill: see `shardmill --help`.

use anyhow::anyhow;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use converter::Error;
use converter::cli::{Cli, Outcome, one_line};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Bad input or usage.
const BAD_INPUT: u8 = 2;
/// What to know about a mapped file that is not there any more.
const ADVICE: &str = "it changed while it was in use, and what was written so far does not open";
/// 128 + SIGINT, as shells expect.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage(&e),
    };
    match run(cli) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::CheckFailed) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("shardmill: error: {}", one_line(&e.to_string()));
            ExitCode::from(e.downcast_ref().map_or(BAD_INPUT, Error::exit_code))
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<Outcome> {
    let interrupt = Arc::new(AtomicBool::new(false));
    formats::map::end_on_fault("shardmill", ADVICE)
        .map_err(|e| anyhow!("cannot watch for faults of mapped files: {e}"))?;
    watch_signals(&interrupt).map_err(|e| anyhow!("cannot watch for signals: {e}"))?;
    Ok(cli.run(interrupt)?)
}

fn watch_signals(interrupt: &Arc<AtomicBool>) -> std::io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The first one asks for an orderly end, the second one does not wait for it.
        flag::register_conditional_shutdown(signal, INTERRUPTED.into(), Arc::clone(interrupt))?;
        flag::register(signal, Arc::clone(interrupt))?;
    }
    // A file beyond the shell's limit is an error of the write that fails, not the end of the program.
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// The program, with the command that was given if it is one.
fn command_asked_for() -> String {
    let given = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    let known = |name: &String| Cli::command().find_subcommand(name).is_some();
    given.filter(known).map_or("shardmill".to_owned(), |name| format!("shardmill {name}"))
}

/// Help and version as clap prints them; what is wrong with the arguments in one line.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let code = if error.use_stderr() { BAD_INPUT } else { 0 };
        // A reader that has seen enough is no error.
        let _ = error.print();
        return ExitCode::from(code);
    }
    let text = error.to_string();
    // clap puts usage and hints into paragraphs of their own.
    let what = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
    let words: Vec<&str> = what.split_whitespace().collect();
    eprintln!("shardmill: error: {}; see `{} --help`", one_line(&words.join(" ")), command_asked_for());
    ExitCode::from(BAD_INPUT)
}
