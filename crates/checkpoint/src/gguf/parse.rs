//! The structure of a GGUF file: header, metadata, tensor table. Nothing in it is believed
//! before it was checked, and nothing is allocated for a count that the file cannot hold.

use std::collections::HashSet;
use std::ops::Range;

use super::format::Format;

/// Longest key of a metadata entry that the specification allows.
const MAX_KEY: u64 = 65_535;
/// ggml keeps names in 64 bytes, the last of which is zero.
const MAX_NAME: u64 = 63;
/// Far more than any model has; a larger count is damage.
const MAX_ENTRIES: u64 = 1 << 17;
/// Alignment of tensor data unless `general.alignment` says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment worth believing.
const MAX_ALIGNMENT: u64 = 1 << 20;

/// Types of metadata values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    U64,
    I64,
    F64,
}

/// A metadata value. Texts and arrays stay in the file; these are their places.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Uint(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array {
        kind: Kind,
        len: usize,
        /// All elements, for texts with their lengths before them.
        bytes: Range<usize>,
    },
}

/// One line of the tensor table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub name: String,
    pub format: Format,
    /// Outermost first, as Hugging Face writes them; GGUF stores the reverse.
    pub shape: Vec<usize>,
    /// Place of the data in the file.
    pub bytes: Range<usize>,
}

impl Tensor {
    /// Values along the innermost dimension.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Product of the outer dimensions.
    pub fn row_count(&self) -> usize {
        self.shape[..self.shape.len().saturating_sub(1)]
            .iter()
            .product()
    }
}

/// A checked file structure.
#[derive(Debug)]
pub(super) struct Structure {
    /// Metadata in file order; keys are unique.
    pub values: Vec<(String, Value)>,
    /// Tensors in file order; names are unique, data are inside the file and do not overlap.
    pub tensors: Vec<Tensor>,
}

/// Read and check the structure of a file with these bytes. The error is one line saying what
/// is wrong and where, without the file's name.
pub(super) fn parse(bytes: &[u8]) -> Result<Structure, String> {
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.take(4, "magic number")? != b"GGUF" {
        return Err("not a GGUF file: it does not begin with \"GGUF\"".to_owned());
    }
    check_version(cursor.u32("version")?)?;
    let tensor_count = cursor.u64("tensor count")?;
    let value_count = cursor.u64("metadata count")?;
    // The shortest entries: name of one byte, 1 dimension; key of one byte, 1-byte value.
    cursor.check_count(tensor_count, 8 + 1 + 4 + 8 + 4 + 8, "tensors")?;
    cursor.check_count(value_count, 8 + 1 + 4 + 1, "metadata entries")?;

    let mut values: Vec<(String, Value)> = Vec::new();
    let mut seen = HashSet::new();
    for index in 0..value_count {
        let (key, value) = read_entry(&mut cursor, index)?;
        if !seen.insert(key.clone()) {
            return Err(format!(
                "metadata key {key} appears twice; the file is damaged"
            ));
        }
        values.push((key, value));
    }
    let alignment = alignment(&values)?;

    let mut table = Vec::new();
    seen.clear();
    for index in 0..tensor_count {
        let entry = read_tensor(&mut cursor, index)?;
        if !seen.insert(entry.name.clone()) {
            return Err(format!(
                "tensor {} appears twice; the file is damaged",
                entry.name
            ));
        }
        if entry.offset % alignment != 0 {
            return Err(format!(
                "tensor {}: its data begin at {}, not a multiple of the file's alignment {alignment}",
                entry.name, entry.offset
            ));
        }
        table.push(entry);
    }
    let start = (cursor.at as u64).next_multiple_of(alignment);
    let tensors = place(table, start, bytes.len() as u64, alignment)?;
    Ok(Structure { values, tensors })
}

/// The texts of an array of texts, or where one is not UTF-8.
pub(super) fn texts(bytes: &[u8], len: usize) -> Result<Vec<&str>, String> {
    let mut cursor = Cursor { bytes, at: 0 };
    // `len` texts were walked over when the file was opened, so the count is real.
    let mut all = Vec::with_capacity(len.min(bytes.len() / 8));
    for index in 0..len {
        let size = cursor.u64("text")?;
        let text = cursor.take(size, "text")?;
        let text = std::str::from_utf8(text).map_err(|_| format!("text {index} is not UTF-8"))?;
        all.push(text);
    }
    Ok(all)
}

fn check_version(version: u32) -> Result<(), String> {
    match version {
        3 => Ok(()),
        _ if version.swap_bytes() <= 3 => Err(
            "this GGUF file is big-endian, which is not supported; convert it to little-endian"
                .to_owned(),
        ),
        _ => Err(format!(
            "GGUF version {version} is not supported, only 3; convert the model with a newer llama.cpp"
        )),
    }
}

fn alignment(values: &[(String, Value)]) -> Result<u64, String> {
    match values.iter().find(|(key, _)| key == "general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        // The specification wants a multiple of 8, which mapped tensors of floats need too.
        Some((_, Value::Uint(given)))
            if given.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(given) =>
        {
            Ok(*given)
        }
        Some((_, value)) => Err(format!(
            "general.alignment is {value:?}; a power of two from 8 to {MAX_ALIGNMENT} is needed"
        )),
    }
}

fn read_entry(cursor: &mut Cursor, index: u64) -> Result<(String, Value), String> {
    let at = cursor.at;
    let size = cursor.u64("key length")?;
    if size == 0 || size > MAX_KEY {
        return Err(format!(
            "metadata entry {index} at byte {at} has a key of {size} bytes; the file is damaged"
        ));
    }
    let key = cursor.take(size, "metadata key")?;
    let key = std::str::from_utf8(key)
        .map_err(|_| format!("the key of metadata entry {index} at byte {at} is not UTF-8"))?
        .to_owned();
    let number = cursor.u32("value type")?;
    let value = if number == 9 {
        cursor.array(&key)
    } else {
        cursor.value(&key, number)
    };
    Ok((key, value?))
}

/// A tensor whose data have not been placed yet.
struct Entry {
    name: String,
    format: Format,
    shape: Vec<usize>,
    offset: u64,
    size: u64,
}

fn read_tensor(cursor: &mut Cursor, index: u64) -> Result<Entry, String> {
    let at = cursor.at;
    let size = cursor.u64("tensor name length")?;
    if size == 0 || size > MAX_NAME {
        return Err(format!(
            "tensor {index} at byte {at} has a name of {size} bytes; the file is damaged"
        ));
    }
    let name = cursor.take(size, "tensor name")?;
    let name = std::str::from_utf8(name)
        .ok()
        .filter(|name| !name.chars().any(char::is_control))
        .ok_or_else(|| format!("the name of tensor {index} at byte {at} is not text"))?
        .to_owned();
    let rank = cursor.u32("tensor rank")?;
    if !(1..=4).contains(&rank) {
        return Err(format!(
            "tensor {name} has {rank} dimensions; 1 to 4 are possible"
        ));
    }
    let mut shape = Vec::with_capacity(4);
    let mut count: u64 = 1;
    for _ in 0..rank {
        let dimension = cursor.u64("tensor dimension")?;
        let product = count
            .checked_mul(dimension)
            .filter(|&product| product <= 1 << 48);
        let (true, Some(product)) = (dimension > 0, product) else {
            return Err(format!(
                "tensor {name} has a dimension of {dimension}; the file is damaged"
            ));
        };
        count = product;
        shape.push(dimension as usize);
    }
    let number = cursor.u32("tensor type")?;
    let format = Format::from_ggml(number).map_err(|other| {
        format!(
            "tensor {name} is of type {other} ({number}), which is not supported; quantise the \
             model to F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K"
        )
    })?;
    if shape[0] % format.block_values() != 0 {
        return Err(format!(
            "tensor {name} has rows of {} values, not a multiple of {}'s {}",
            shape[0],
            format.name(),
            format.block_values()
        ));
    }
    let size = count / format.block_values() as u64 * format.block_bytes() as u64;
    shape.reverse();
    Ok(Entry {
        name,
        format,
        shape,
        offset: cursor.u64("tensor offset")?,
        size,
    })
}

/// Turn offsets into places in a file of `length` bytes whose data begin at `start`.
fn place(table: Vec<Entry>, start: u64, length: u64, align: u64) -> Result<Vec<Tensor>, String> {
    let mut tensors = Vec::with_capacity(table.len());
    for entry in table {
        let from = start.checked_add(entry.offset);
        let to = from.and_then(|from| from.checked_add(entry.size));
        match (from, to) {
            (Some(from), Some(to)) if to <= length => tensors.push(Tensor {
                name: entry.name,
                format: entry.format,
                shape: entry.shape,
                bytes: from as usize..to as usize,
            }),
            _ => {
                return Err(format!(
                    "tensor {} lies beyond the end of the file ({} bytes at {}, file of {length}); \
                     the file is cut short or damaged, fetch it again",
                    entry.name,
                    entry.size,
                    start.saturating_add(entry.offset),
                ));
            }
        }
    }
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_unstable_by_key(|tensor| tensor.bytes.start);
    for pair in order.windows(2) {
        if pair[0].bytes.end > pair[1].bytes.start {
            return Err(format!(
                "tensors {} and {} overlap; the file is damaged",
                pair[0].name, pair[1].name
            ));
        }
    }
    let end = order.last().map_or(start, |tensor| tensor.bytes.end as u64);
    if length > end.next_multiple_of(align) {
        return Err(format!(
            "the file has {} bytes more than its header describes; it is damaged or two files joined",
            length - end
        ));
    }
    Ok(tensors)
}

/// A place in the file; reads never pass its end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, size: u64, what: &str) -> Result<&'a [u8], String> {
        if size > self.left() {
            return Err(format!(
                "the file ends inside a {what} of {size} bytes at byte {}; it is cut short or \
                 damaged, fetch it again",
                self.at
            ));
        }
        let taken = &self.bytes[self.at..self.at + size as usize];
        self.at += size as usize;
        Ok(taken)
    }

    fn array_of<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array_of(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array_of(what)?))
    }

    fn check_count(&self, count: u64, least: u64, what: &str) -> Result<(), String> {
        if count > MAX_ENTRIES || count.saturating_mul(least) > self.left() {
            return Err(format!(
                "the header announces {count} {what} in {} bytes; the file is cut short or damaged",
                self.left()
            ));
        }
        Ok(())
    }

    fn value(&mut self, key: &str, number: u32) -> Result<Value, String> {
        Ok(match kind(key, number)? {
            Kind::U8 => Value::Uint(u64::from(self.array_of::<1>(key)?[0])),
            Kind::I8 => Value::Int(i64::from(i8::from_le_bytes(self.array_of(key)?))),
            Kind::U16 => Value::Uint(u64::from(u16::from_le_bytes(self.array_of(key)?))),
            Kind::I16 => Value::Int(i64::from(i16::from_le_bytes(self.array_of(key)?))),
            Kind::U32 => Value::Uint(u64::from(self.u32(key)?)),
            Kind::I32 => Value::Int(i64::from(i32::from_le_bytes(self.array_of(key)?))),
            Kind::F32 => Value::Float(f64::from(f32::from_le_bytes(self.array_of(key)?))),
            Kind::Bool => match self.array_of::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    return Err(format!(
                        "{key} is a truth value of {other}; 0 or 1 is needed"
                    ));
                }
            },
            Kind::Text => {
                let size = self.u64(key)?;
                let from = self.at;
                let text = self.take(size, key)?;
                std::str::from_utf8(text).map_err(|_| format!("{key} is not UTF-8"))?;
                Value::Text(from..self.at)
            }
            Kind::U64 => Value::Uint(self.u64(key)?),
            Kind::I64 => Value::Int(i64::from_le_bytes(self.array_of(key)?)),
            Kind::F64 => Value::Float(f64::from_le_bytes(self.array_of(key)?)),
        })
    }

    fn array(&mut self, key: &str) -> Result<Value, String> {
        let number = self.u32(key)?;
        if number == 9 {
            return Err(format!(
                "{key} is an array of arrays, which is not supported"
            ));
        }
        let kind = kind(key, number)?;
        let count = self.u64(key)?;
        let least = match kind {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 | Kind::Text => 8,
        };
        let size = count
            .checked_mul(least)
            .filter(|&size| size <= self.left())
            .ok_or_else(|| {
                format!(
                    "{key} announces {count} elements in {} bytes; the file is cut short or damaged",
                    self.left()
                )
            })?;
        let from = self.at;
        if kind == Kind::Text {
            for _ in 0..count {
                let size = self.u64(key)?;
                self.take(size, key)?;
            }
        } else {
            self.take(size, key)?;
        }
        Ok(Value::Array {
            kind,
            len: count as usize,
            bytes: from..self.at,
        })
    }
}

fn kind(key: &str, number: u32) -> Result<Kind, String> {
    Ok(match number {
        0 => Kind::U8,
        1 => Kind::I8,
        2 => Kind::U16,
        3 => Kind::I16,
        4 => Kind::U32,
        5 => Kind::I32,
        6 => Kind::F32,
        7 => Kind::Bool,
        8 => Kind::Text,
        10 => Kind::U64,
        11 => Kind::I64,
        12 => Kind::F64,
        _ => {
            return Err(format!(
                "{key} has the unknown value type {number}; the file is damaged"
            ));
        }
    })
}
