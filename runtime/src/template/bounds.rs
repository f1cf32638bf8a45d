//! Keeps what a template computes small.
//!
//! The engine's fuel pays for strings and for the items of lists that are made, but some lists are promises: `x + x` takes
//! a few bytes whatever `x` is, and so does `[x, x]`, and each may be doubled again. Printed, compared or put together at
//! last they take all the memory there is. So every instruction that makes a value is followed by one that measures it with
//! all that is in it, and no value may be larger than any prompt. What is printed, joined or compared then is bounded too.

use super::unsupported;
use minijinja::machinery::{CompiledTemplate, Instruction, Instructions, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{ValueIter, ValueKind};
use minijinja::{Environment, Error, State, Value};
use std::collections::BTreeMap;

/// Most bytes of a value with all that is in it, an item being [`ITEM`]: more than any context holds. Some lists hold some 25
/// times of this while they are gone through, such as `zip` of itself, again and again.
const LARGEST: usize = 8 << 20;
/// What an item of a list takes besides its own bytes.
const ITEM: usize = 32;
/// Items that are measured for one unit of fuel.
const ITEMS_PER_FUEL: usize = 16;
/// Most items that a list of constants may be repeated to: the compiler computes those, without fuel.
const MOST_REPEATED: u128 = 1 << 20;

/// Names that no template can write: what begins with # is no name.
const MEASURE: &str = "#measured";
const HOLD: &str = "#held";

/// Adds what the instructions of [`Bounded`] call.
pub(super) fn add_filters(environment: &mut Environment<'_>) {
    environment
        .add_filter(MEASURE, |state: &State<'_, '_>, value: Value| measure(state, &value).map(|()| value));
    environment.add_filter(HOLD, |state: &State<'_, '_>, value: Value| {
        if is_namespace(&value) {
            return Err(namespace_inside());
        }
        measure(state, &value).map(|()| value)
    });
}

/// A template whose values are measured as they are made.
pub(super) struct Bounded<'a> {
    pub(super) instructions: Instructions<'a>,
    pub(super) blocks: BTreeMap<&'a str, Instructions<'a>>,
}

impl<'a> Bounded<'a> {
    /// # Errors
    /// It takes in other templates, of which there are none.
    pub(super) fn new(template: &CompiledTemplate<'a>) -> Result<Self, Error> {
        let blocks = template.blocks.iter().map(|(&name, block)| Ok((name, rewrite(block)?)));
        Ok(Self {
            instructions: rewrite(&template.instructions)?,
            blocks: blocks.collect::<Result<_, Error>>()?,
        })
    }
}

/// The same instructions with measurements between them.
fn rewrite<'a>(all: &Instructions<'a>) -> Result<Instructions<'a>, Error> {
    let each = || (0..).map_while(|at| all.get(at).map(|instruction| (at, instruction)));
    // Where each instruction goes: a jump to one goes to what is put before it.
    let mut places = Vec::new();
    let mut place = 0;
    for (_, instruction) in each() {
        places.push(place);
        place += match instruction {
            Instruction::SetAttr(_) => 4,
            made if makes_a_value(made) => 2,
            _ => 1,
        };
    }
    places.push(place);
    let target = |at: u32| places[at as usize];
    let mut out = Instructions::new(all.name(), all.source());
    for (at, instruction) in each() {
        let line = all.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(0);
        let mut put = |instruction| out.add_with_line(instruction, line);
        match instruction {
            Instruction::Include(_) | Instruction::LoadBlocks | Instruction::ExportLocals => {
                return Err(unsupported("a chat template stands alone: it can take no other in"));
            }
            Instruction::SetAttr(_) => {
                // The value lies below what it is put into.
                put(Instruction::Swap);
                put(Instruction::ApplyFilter(HOLD, Some(1), u8::MAX));
                put(Instruction::Swap);
                put(instruction.clone())
            }
            Instruction::Iterate(to) => put(Instruction::Iterate(target(*to))),
            Instruction::Jump(to) => put(Instruction::Jump(target(*to))),
            Instruction::JumpIfFalse(to) => put(Instruction::JumpIfFalse(target(*to))),
            Instruction::JumpIfFalseOrPop(to) => put(Instruction::JumpIfFalseOrPop(target(*to))),
            Instruction::JumpIfTrueOrPop(to) => put(Instruction::JumpIfTrueOrPop(target(*to))),
            Instruction::BuildMacro(name, to, flags) => {
                put(Instruction::BuildMacro(name, target(*to), *flags))
            }
            made if makes_a_value(made) => {
                put(made.clone());
                put(Instruction::ApplyFilter(MEASURE, Some(1), u8::MAX))
            }
            other => put(other.clone()),
        };
    }
    Ok(out)
}

/// Whether an instruction can make a value larger than those that it is made of.
fn makes_a_value(instruction: &Instruction<'_>) -> bool {
    matches!(
        instruction,
        Instruction::BuildList(_)
            | Instruction::BuildMap(_)
            | Instruction::BuildTuple(_)
            | Instruction::Add
            | Instruction::Mul
            | Instruction::Slice
            | Instruction::ApplyFilter(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
    )
}

/// Refuses a value that is too large. Strings alone are paid for by fuel.
fn measure(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let (mut bytes, mut items) = (0, 0_usize);
    // Depth first: some lists make their items anew whenever they are asked, so few are held at a time.
    let mut open: Vec<Container> = Container::of(value)?.into_iter().collect();
    while let Some(container) = open.last_mut() {
        let Some(key) = container.items.next() else {
            open.pop();
            continue;
        };
        let text = |value: &Value| value.as_str().map_or(0, str::len);
        let item = match &container.map {
            Some(map) => {
                bytes += text(&key);
                map.get_item(&key)?
            }
            None => key,
        };
        if is_namespace(&item) {
            return Err(namespace_inside());
        }
        bytes += ITEM + text(&item);
        if bytes > LARGEST {
            return Err(unsupported(format!("a value of more than {LARGEST} bytes")));
        }
        items += 1;
        if items.is_multiple_of(ITEMS_PER_FUEL) {
            state.consume_fuel(1)?;
        }
        open.extend(Container::of(&item)?);
    }
    Ok(())
}

/// A list or a map on the way through it.
struct Container {
    /// What the items are keys of.
    map: Option<Value>,
    items: ValueIter,
}

impl Container {
    fn of(value: &Value) -> Result<Option<Self>, Error> {
        let map = match value.kind() {
            ValueKind::Map => Some(value.clone()),
            ValueKind::Seq | ValueKind::Iterable => None,
            _ => return Ok(None),
        };
        Ok(Some(Self { map, items: value.try_iter()? }))
    }
}

/// What `namespace()` makes can change after it was measured, so nothing may hold it but a variable.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

fn namespace_inside() -> Error {
    unsupported("a namespace inside of another value")
}

/// Looks for what the compiler would compute without end.
///
/// # Errors
/// The line of a list of constants that is repeated too often.
pub(super) fn check_constants(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let (mut product, mut lists, mut repeats) = (1_u128, 0_u128, false);
    for token in tokenize(source, false, syntax) {
        let (token, span) = token?;
        match token {
            Token::VariableStart | Token::BlockStart => (product, lists, repeats) = (1, 0, false),
            Token::BracketOpen => lists += 1,
            Token::Mul => repeats = true,
            Token::Pow => (repeats, product) = (true, u128::MAX),
            Token::Int(number) => product = product.saturating_mul(u128::from(number).max(1)),
            Token::Int128(_) => product = u128::MAX,
            Token::VariableEnd | Token::BlockEnd
                if repeats && lists > 0 && product.saturating_mul(lists) > MOST_REPEATED =>
            {
                return Err(unsupported(format!(
                    "line {}: numbers and lists that are multiplied come to more than {MOST_REPEATED} items",
                    span.start_line
                )));
            }
            _ => (),
        }
    }
    Ok(())
}
