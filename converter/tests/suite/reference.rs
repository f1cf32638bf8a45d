//! Completions and manual pages name everything that the command line takes.

use crate::files::{refused, shardmill};
use clap::CommandFactory;
use converter::cli::Cli;
use tempfile::TempDir;

/// Every command with its long flags.
fn commands() -> Vec<(String, Vec<String>)> {
    let cli = Cli::command();
    let of = |command: &clap::Command| {
        let flags = command.get_arguments().filter_map(|argument| argument.get_long().map(str::to_owned));
        (command.get_name().to_owned(), flags.collect())
    };
    cli.get_subcommands().map(of).collect()
}

#[test]
fn completions_name_every_command_and_flag() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = shardmill(&["completions".as_ref(), shell.as_ref()]).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        let script = String::from_utf8(output.stdout).unwrap();
        for (command, flags) in commands() {
            assert!(script.contains(&command), "{shell} does not know {command}");
            for flag in flags {
                // fish has a flag's name without its dashes.
                let spelt = if shell == "fish" { format!("-l {flag}") } else { format!("--{flag}") };
                assert!(script.contains(&spelt), "{shell} does not know {spelt}");
            }
        }
    }
    refused(&mut shardmill(&["completions".as_ref(), "abacus".as_ref()]), 2);
}

#[test]
fn there_is_a_page_for_every_command_with_every_flag() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join("man1");
    // Twice, because a package is built again and again.
    for _ in 0..2 {
        let output = shardmill(&["man".as_ref(), dir.as_os_str()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let page = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap().replace('\\', "");
    let first = page("shardmill.1");
    let commands = commands();
    for (command, flags) in &commands {
        assert!(first.contains(&format!("shardmill-{command}(1)")), "{command} is not in the first page");
        let own = page(&format!("shardmill-{command}.1"));
        let footer = own.lines().find(|line| line.starts_with(".TH")).unwrap();
        let version = concat!("\"shardmill ", env!("CARGO_PKG_VERSION"), "\"");
        assert!(footer.contains(&format!("shardmill-{command} 1")) && footer.contains(version), "{footer}");
        for flag in flags {
            assert!(own.contains(&format!("--{flag}")), "{command} has no --{flag}");
        }
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), commands.len() + 1);
    let file = temp.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let said = refused(&mut shardmill(&["man".as_ref(), file.as_os_str()]), 2);
    assert!(said.contains("cannot create the directory"), "{said}");
}
