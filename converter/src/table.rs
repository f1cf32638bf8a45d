//! Columns of text for terminals.

/// On which side a column's spaces are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows with their columns aligned, two spaces apart, each line ended and without trailing spaces.
pub(crate) fn table(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let width = |text: &str| text.chars().count();
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, (head, _))| rows.iter().map(|row| width(&row[i])).max().unwrap_or(0).max(width(head)))
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, (_, align)), &wide) in cells.zip(columns).zip(&widths) {
            let gap = " ".repeat(wide - width(cell));
            line.push_str(&match align {
                Align::Left => format!("{cell}{gap}  "),
                Align::Right => format!("{gap}{cell}  "),
            });
        }
        format!("{}\n", line.trim_end())
    };
    let mut text = line(&mut columns.iter().map(|(head, _)| *head));
    for row in rows {
        text.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_on_their_side() {
        let rows = [vec!["a".to_owned(), "10".to_owned()], vec!["bcd".to_owned(), "5".to_owned()]];
        assert_eq!(
            table(&[("name", Align::Left), ("n", Align::Right)], &rows),
            "name   n\na     10\nbcd    5\n"
        );
    }
}
