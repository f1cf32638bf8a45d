//! GGUF metadata: keys with typed values. Strings and arrays stay slices of the file until somebody asks for them.

use crate::Error;
use crate::reader::Reader;
use bytes::Bytes;
use std::collections::HashMap;

/// Arrays of arrays are legal GGUF; deeper than this they are an attack.
const MAX_DEPTH: usize = 4;

/// Type of a metadata value, with GGUF's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each name is its own documentation")]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn read(reader: &mut Reader<'_>, key: &str) -> Result<Self, Error> {
        let id = reader.u32(key)?;
        Self::ALL.get(id as usize).copied().ok_or_else(|| Error::Key {
            key: key.to_owned(),
            expected: "a value type from 0 to 12".to_owned(),
            found: id.to_string(),
        })
    }

    /// Bytes of one value; for strings and arrays the least it can take.
    fn least_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::String | Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Array => 12,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "each name is its own documentation")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Bytes that should be UTF-8.
    String(Bytes),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// The value as a number that counts something: any integer type, not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(n) => Some(n.into()),
            Self::U16(n) => Some(n.into()),
            Self::U32(n) => Some(n.into()),
            Self::U64(n) => Some(n),
            Self::I8(n) => n.try_into().ok(),
            Self::I16(n) => n.try_into().ok(),
            Self::I32(n) => n.try_into().ok(),
            Self::I64(n) => n.try_into().ok(),
            _ => None,
        }
    }

    /// The value as a float: either float type.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Self::F32(x) => Some(x),
            Self::F64(x) => Some(x as f32),
            _ => None,
        }
    }

    /// The value as a bool.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(b) => Some(b),
            _ => None,
        }
    }

    /// The value as text; `None` for other types and for bytes that are not UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => std::str::from_utf8(s).ok(),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(a) => Some(a),
            _ => None,
        }
    }

    fn read(reader: &mut Reader<'_>, file: &Bytes, ty: ValueType, key: &str) -> Result<Self, Error> {
        Ok(match ty {
            ValueType::U8 => Self::U8(reader.take_array::<1>(key)?[0]),
            ValueType::I8 => Self::I8(i8::from_le_bytes(reader.take_array(key)?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(reader.take_array(key)?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(reader.take_array(key)?)),
            ValueType::U32 => Self::U32(reader.u32(key)?),
            ValueType::I32 => Self::I32(i32::from_le_bytes(reader.take_array(key)?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(reader.take_array(key)?)),
            ValueType::Bool => Self::Bool(reader.take_array::<1>(key)?[0] != 0),
            ValueType::String => Self::String(file.slice_ref(reader.string(key)?)),
            ValueType::Array => Self::Array(Array::read(reader, file, key)?),
            ValueType::U64 => Self::U64(reader.u64(key)?),
            ValueType::I64 => Self::I64(i64::from_le_bytes(reader.take_array(key)?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(reader.take_array(key)?)),
        })
    }
}

/// What an error or a listing says of a value: short, one line.
impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::U8(n) => write!(f, "{n} (u8)"),
            Self::I8(n) => write!(f, "{n} (i8)"),
            Self::U16(n) => write!(f, "{n} (u16)"),
            Self::I16(n) => write!(f, "{n} (i16)"),
            Self::U32(n) => write!(f, "{n} (u32)"),
            Self::I32(n) => write!(f, "{n} (i32)"),
            Self::U64(n) => write!(f, "{n} (u64)"),
            Self::I64(n) => write!(f, "{n} (i64)"),
            Self::F32(x) => write!(f, "{x} (f32)"),
            Self::F64(x) => write!(f, "{x} (f64)"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::String(s) => {
                const SHOWN: usize = 60;
                let text = String::from_utf8_lossy(s);
                let short: String = text.chars().take(SHOWN).collect();
                let more = if text.chars().nth(SHOWN).is_some() { "..." } else { "" };
                write!(f, "{short:?}{more}")
            }
            Self::Array(a) => write!(f, "an array of {} {}", a.len(), a.element.name()),
        }
    }
}

/// An array, still in the file's bytes. Its walk was done when it was read, so iteration cannot fail.
#[derive(Clone, Debug)]
pub struct Array {
    element: ValueType,
    len: usize,
    bytes: Bytes,
}

impl Array {
    /// Type of the elements.
    pub fn element(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements as strings, if that is what they are.
    pub fn strings(&self) -> Option<impl Iterator<Item = &[u8]>> {
        if self.element != ValueType::String {
            return None;
        }
        let mut reader = Reader::new(&self.bytes);
        Some((0..self.len).map_while(move |_| reader.string("array").ok()))
    }

    /// The elements as values; `None` for arrays of arrays.
    pub fn values(&self) -> Option<impl Iterator<Item = Value>> {
        if self.element == ValueType::Array {
            return None;
        }
        let mut reader = Reader::new(&self.bytes);
        Some(
            (0..self.len)
                .map_while(move |_| Value::read(&mut reader, &self.bytes, self.element, "array").ok()),
        )
    }

    fn read(reader: &mut Reader<'_>, file: &Bytes, key: &str) -> Result<Self, Error> {
        let element = ValueType::read(reader, key)?;
        let len = reader.count(element.least_bytes(), key)?;
        let start = reader.position();
        skip(reader, element, len, key, 1)?;
        Ok(Self { element, len, bytes: file.slice(start..reader.position()) })
    }
}

fn skip(
    reader: &mut Reader<'_>,
    element: ValueType,
    len: usize,
    key: &str,
    depth: usize,
) -> Result<(), Error> {
    match element {
        ValueType::String => {
            for _ in 0..len {
                reader.string(key)?;
            }
        }
        ValueType::Array if depth >= MAX_DEPTH => {
            return Err(Error::Key {
                key: key.to_owned(),
                expected: format!("arrays nested at most {MAX_DEPTH} deep"),
                found: "deeper ones".to_owned(),
            });
        }
        ValueType::Array => {
            for _ in 0..len {
                let inner = ValueType::read(reader, key)?;
                let count = reader.count(inner.least_bytes(), key)?;
                skip(reader, inner, count, key, depth + 1)?;
            }
        }
        plain => {
            reader.take(len * plain.least_bytes(), key)?;
        }
    }
    Ok(())
}

/// All keys of a file, in its order.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn read(reader: &mut Reader<'_>, file: &Bytes, count: usize) -> Result<Self, Error> {
        let mut metadata = Self::default();
        for i in 0..count {
            let what = match metadata.entries.last() {
                Some((last, _)) => format!("metadata key {i} (after {last})"),
                None => format!("metadata key {i}"),
            };
            let key = reader.name(&what)?.to_owned();
            let ty = ValueType::read(reader, &key)?;
            let value = Value::read(reader, file, ty, &key)?;
            if let Some(first) = metadata.value(&key) {
                let found =
                    format!("it twice, {first} and {value}; the file is damaged, convert the model again");
                return Err(Error::Key { key, expected: "every key once".to_owned(), found });
            }
            metadata.index.insert(key.clone(), metadata.entries.len());
            metadata.entries.push((key, value));
        }
        Ok(metadata)
    }

    /// All keys with their values, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True without keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    /// A count: any integer type, not negative.
    ///
    /// # Errors
    /// [`Error::Key`] when the key has another type or a negative value.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "an integer that is not negative", Value::as_u64)
    }

    /// A float.
    ///
    /// # Errors
    /// [`Error::Key`] when the key has another type.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, "a float", Value::as_f32)
    }

    /// A bool.
    ///
    /// # Errors
    /// [`Error::Key`] when the key has another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "a bool", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    /// [`Error::Key`] when the key has another type or is not UTF-8.
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a UTF-8 string", Value::as_str)
    }

    /// An array.
    ///
    /// # Errors
    /// [`Error::Key`] when the key has another type.
    pub fn array(&self, key: &str) -> Result<Option<&Array>, Error> {
        self.typed(key, "an array", Value::as_array)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        as_t: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.value(key) else { return Ok(None) };
        as_t(value).map(Some).ok_or_else(|| Error::Key {
            key: key.to_owned(),
            expected: expected.to_owned(),
            found: value.to_string(),
        })
    }
}
