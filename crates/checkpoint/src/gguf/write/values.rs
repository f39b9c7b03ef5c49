//! GGUF's metadata values.

/// Keys and values, written one after the other.
#[derive(Default)]
pub(super) struct Values {
    pub bytes: Vec<u8>,
    pub count: usize,
}

/// Numbers by which GGUF names types of values.
const UINT32: u32 = 4;
const INT32: u32 = 5;
const FLOAT32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A text with its length.
pub(super) fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

impl Values {
    fn key(&mut self, key: &str, kind: u32) {
        self.count += 1;
        text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
    }

    fn array(&mut self, key: &str, kind: u32, len: usize) {
        self.key(key, ARRAY);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend((len as u64).to_le_bytes());
    }

    pub fn uint(&mut self, key: &str, value: u32) {
        self.key(key, UINT32);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn size(&mut self, key: &str, value: usize) {
        self.uint(key, u32::try_from(value).unwrap_or(u32::MAX));
    }

    pub fn float(&mut self, key: &str, value: f32) {
        self.key(key, FLOAT32);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn bool(&mut self, key: &str, value: bool) {
        self.key(key, BOOL);
        self.bytes.push(u8::from(value));
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.key(key, STRING);
        text(&mut self.bytes, value);
    }

    pub fn ints(&mut self, key: &str, values: &[i32]) {
        self.array(key, INT32, values.len());
        for value in values {
            self.bytes.extend(value.to_le_bytes());
        }
    }

    pub fn floats(&mut self, key: &str, values: &[f32]) {
        self.array(key, FLOAT32, values.len());
        for value in values {
            self.bytes.extend(value.to_le_bytes());
        }
    }

    pub fn bools(&mut self, key: &str, values: &[bool]) {
        self.array(key, BOOL, values.len());
        self.bytes
            .extend(values.iter().map(|&value| u8::from(value)));
    }

    pub fn texts<T: AsRef<str>>(&mut self, key: &str, values: &[T]) {
        self.array(key, STRING, values.len());
        for value in values {
            text(&mut self.bytes, value.as_ref());
        }
    }
}
